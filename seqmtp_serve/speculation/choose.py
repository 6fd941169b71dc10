"""The token each target row yields, under the three verification contracts.

One convention makes the contracts alike: a row that judges a draft y yields y exactly when it accepts y (a correction
under `ratio` comes from max(p - q, 0), which is 0 at a rejected y). So the chain rule is one line for all three: go on
while the row's token equals the draft. A row without a draft (bonus, plain decoding, bootstrap) samples from p.

* greedy: the lowest id among the largest logits; no softmax is computed.
* ratio: y if u < min(1, p(y) / q(y)), else a draw from normalised max(p - q, 0) (Leviathan et al., arXiv 2211.17192).
* coupled: argmax of log p + g, with the position's Gumbel noise g, which the draft used too (Daliri et al., arXiv
  2408.07978). The draft is not looked at: the text cannot depend on it.

Shapes: N rows, V tokens, n pairs of a draft distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seqmtp_serve.errors import ProtocolError
from seqmtp_serve.request import Contract
from seqmtp_serve.speculation.distributions import (
    BadLogits,
    ban_tokens,
    filtered_logits,
    first_argmax,
    inverse_cdf,
    raise_unless_finite,
    target_probs,
)
from seqmtp_serve.speculation.noise import Purpose, gumbel, uniforms
from seqmtp_serve.speculation.row_params import RowParams

NO_DRAFT = -1
"""Stands for the draft of a row that judges none."""

BAD_ROW, OUTSIDE_Q = -2, -3
"""Stand for the token of a row whose logits cannot be sampled from, or whose draft is not in its own distribution."""

_TILE_ELEMENTS = 1 << 16  # of one float64 working array on CPU: 512 KiB, a share of L2


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Tokens of N rows. `num_clamped` counts drafts accepted because rejecting had no residual mass (rounding)."""

    tokens: list[int]
    num_clamped: int = 0


def choose_tokens(
    logits_NV: Tensor,
    params: RowParams,
    positions: Sequence[int],
    drafts: Sequence[int],
    q_tokens_Nn: Tensor,
    q_probs_Nn: Tensor,
) -> Choices:
    """One token per row; rows of different contracts mix freely. `positions` are those of the tokens chosen.

    On CPU rows are handled in tiles that stay in cache: one row at a time at a real vocabulary, which also makes a
    row's bits independent of its neighbours by construction. Raises BadLogits and ProtocolError (a draft outside q).
    """
    logits_NV = ban_tokens(logits_NV, params, positions)
    tokens = [NO_DRAFT] * len(positions)
    num_clamped = 0
    for contract, rows in _tiles(params.contracts, logits_NV):
        index = slice(None) if len(rows) == len(tokens) else torch.tensor(rows, device=logits_NV.device)  # no copy
        tile_params = params.take(rows)
        position_N = torch.tensor([positions[row] for row in rows], device=logits_NV.device)
        try:
            if contract is Contract.GREEDY:
                chosen_N = greedy_tokens(logits_NV[index])
            elif contract is Contract.COUPLED:
                chosen_N = coupled_tokens(logits_NV[index], tile_params, position_N)
            else:
                draft_N = torch.tensor([drafts[row] for row in rows], device=logits_NV.device)
                chosen_N, clamped = ratio_tokens(
                    logits_NV[index], tile_params, position_N, draft_N, q_tokens_Nn[index], q_probs_Nn[index]
                )
                num_clamped += clamped
        except BadLogits as error:
            raise BadLogits([rows[row] for row in error.rows]) from None
        for row, token in zip(rows, chosen_N.tolist(), strict=True):
            tokens[row] = token
    return Choices(tokens=tokens, num_clamped=num_clamped)


def choose_unseen(
    logits_NV: Tensor,
    params: RowParams,
    positions: Sequence[int],
    drafts: Sequence[int],
    q_tokens_Nn: Tensor,
    q_probs_Nn: Tensor,
) -> Tensor:
    """`choose_tokens` without a look at any value, so that on a GPU the host need not wait: `[2, N]` int64.

    First the tokens, `BAD_ROW` or `OUTSIDE_Q` where that would have raised; then 1 for each draft that was clamped.
    """
    logits_NV = ban_tokens(logits_NV, params, positions)
    is_finite_N = torch.isfinite(logits_NV.amax(-1))
    logits_NV = logits_NV.masked_fill(~is_finite_N[:, None], 0.0)  # any finite row will do
    outcome_2N = torch.zeros(2, len(positions), dtype=torch.int64, device=logits_NV.device)
    for contract, rows in _tiles(params.contracts, logits_NV):
        index_n = torch.tensor(rows, device=logits_NV.device)
        row_params = params.take(rows)
        position_n = torch.tensor([positions[row] for row in rows], device=logits_NV.device)
        if contract is Contract.GREEDY:
            outcome_2N[0, index_n] = greedy_tokens(logits_NV[index_n], are_finite=True)
        elif contract is Contract.COUPLED:
            outcome_2N[0, index_n] = coupled_tokens(logits_NV[index_n], row_params, position_n, are_finite=True)
        else:
            draft_n = torch.tensor([drafts[row] for row in rows], device=logits_NV.device)
            prob_nV = target_probs(logits_NV[index_n], row_params, are_finite=True)
            judged = _judge(prob_nV, row_params, position_n, draft_n, q_tokens_Nn[index_n], q_probs_Nn[index_n])
            outcome_2N[0, index_n] = judged.token_N.masked_fill(judged.is_outside_q_N, OUTSIDE_Q)
            outcome_2N[1, index_n] = judged.is_clamped_N.long()
    outcome_2N[0].masked_fill_(~is_finite_N, BAD_ROW)
    return outcome_2N


def greedy_tokens(logits_NV: Tensor, *, are_finite: bool = False) -> Tensor:
    """The lowest id [N] among the largest logits. Raises BadLogits, unless all maxima are known to be finite."""
    token_N, top_N = first_argmax(logits_NV)
    if not are_finite:
        raise_unless_finite(top_N)
    return token_N


def coupled_tokens(
    logits_NV: Tensor,
    params: RowParams,
    position_N: Tensor,
    token_ids_V: Tensor | None = None,
    *,
    are_finite: bool = False,
) -> Tensor:
    """argmax [N] of log p + g: column indices. A proposer gives the ids of its columns, so that g is the target's.

    Raises BadLogits as `filtered_logits` does.
    """
    if token_ids_V is None:
        token_ids_V = torch.arange(logits_NV.shape[-1], device=logits_NV.device)
    log_NV = filtered_logits(logits_NV, params, are_finite=are_finite)
    key_N = params.keys(position_N, Purpose.TOKEN)
    if not all(params.is_filtered) or logits_NV.device.type != "cpu":
        return gumbel(key_N, token_ids_V).add_(log_NV).argmax(-1)
    column_C = (log_NV > float("-inf")).any(0).nonzero()[:, 0]  # the noise of other columns cannot matter
    return column_C[gumbel(key_N, token_ids_V[column_C]).add_(log_NV[:, column_C]).argmax(-1)]


def ratio_tokens(
    logits_NV: Tensor,
    params: RowParams,
    position_N: Tensor,
    draft_N: Tensor,
    q_tokens_Nn: Tensor,
    q_probs_Nn: Tensor,
) -> tuple[Tensor, int]:
    """Tokens [N], and how many rejections were clamped. Rows at NO_DRAFT must have all their q probabilities 0."""
    judged = _judge(target_probs(logits_NV, params), params, position_N, draft_N, q_tokens_Nn, q_probs_Nn)
    if bool(judged.is_outside_q_N.any()):
        raise ProtocolError("a draft token has probability 0 in its own distribution")
    return judged.token_N, int(judged.is_clamped_N.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    token_N: Tensor
    is_clamped_N: Tensor
    is_outside_q_N: Tensor


def _judge(
    prob_NV: Tensor,
    params: RowParams,
    position_N: Tensor,
    draft_N: Tensor,
    q_tokens_Nn: Tensor,
    q_probs_Nn: Tensor,
) -> _Judged:
    """The ratio contract. `prob_NV` is used up."""
    has_draft_N = draft_N != NO_DRAFT
    draft_N1 = draft_N.clamp_min(0)[:, None]
    p_draft_N = prob_NV.gather(-1, draft_N1)[:, 0]
    q_draft_N = q_probs_Nn.masked_fill(q_tokens_Nn != draft_N1, 0.0).sum(-1)
    u_accept_N = uniforms(params.keys(position_N, Purpose.ACCEPT))
    accept_N = has_draft_N & (u_accept_N < p_draft_N / q_draft_N)  # u < 1, so min(1, .) changes nothing
    excess_NV = prob_NV.scatter_add_(-1, q_tokens_Nn, -q_probs_Nn).clamp_min_(0.0)  # p itself without a draft
    clamp_N = has_draft_N & ~accept_N & (excess_NV.amax(-1) <= 0.0)
    resampled_N = inverse_cdf(excess_NV, uniforms(params.keys(position_N, Purpose.RESAMPLE)))
    return _Judged(
        token_N=torch.where(accept_N | clamp_N, draft_N, resampled_N),
        is_clamped_N=clamp_N,
        is_outside_q_N=has_draft_N & (q_draft_N <= 0.0),
    )


def _tiles(contracts: Sequence[Contract], logits_NV: Tensor) -> list[tuple[Contract, list[int]]]:
    """The rows of each contract, cut into tiles."""
    num_rows = max(1, _TILE_ELEMENTS // logits_NV.shape[-1]) if logits_NV.device.type == "cpu" else len(contracts)
    tiles = []
    for contract in Contract:
        rows = [row for row, each in enumerate(contracts) if each is contract]
        limit = len(rows) if contract is Contract.GREEDY else num_rows
        tiles += [(contract, rows[start : start + limit]) for start in range(0, len(rows), limit or 1)]
    return tiles
