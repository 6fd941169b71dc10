"""What a proposer draws from its logits: one draft token per row, and the distribution it was really drawn from.

Contracts other than `ratio` need no distribution. Under `ratio`, q is the top n of the draft's own tempered and
filtered distribution, renormalised, and y is drawn from exactly the numbers sent. Filters on a draft only raise its
acceptance; they do not touch what the target's text is distributed as.

Shapes: B rows, V draft-vocabulary columns, n pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seqmtp_serve.request import Contract, Shaping
from seqmtp_serve.speculation.choose import BAD_ROW, coupled_tokens, greedy_tokens
from seqmtp_serve.speculation.distributions import BadLogits, ban_tokens, inverse_cdf, target_probs
from seqmtp_serve.speculation.noise import Purpose, uniforms
from seqmtp_serve.speculation.row_params import RowParams
from seqmtp_serve.speculation.shaping import lightly_shaped
from seqmtp_serve.speculation.sparse_q import Pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposals:
    """Draft tokens of B rows, as vocabulary ids; `pairs[b]` is empty unless the row's contract is `ratio`."""

    tokens: list[int]
    pairs: list[Pairs]


def propose_tokens(
    logits_BV: Tensor,
    draft_token_ids_V: Tensor,
    params: RowParams,
    positions_B: Sequence[int],
    top_n: int,
    shapings: Sequence[Shaping | None] = (),
) -> Proposals:
    """Draw one draft per row, for the token at `positions_B[b]`.

    `draft_token_ids_V` are the ids of the columns, each once; ascending ids make greedy ties fall as the target's do.
    `shapings`, one a row, are followed as far as they need no context. Raises BadLogits; on a GPU the host hears of a
    bad row with the tokens, which come in one transfer, and the distributions of `ratio` in another.
    """
    logits_BV = lightly_shaped(logits_BV, shapings, draft_token_ids_V)
    logits_BV = ban_tokens(logits_BV, params, positions_B, draft_token_ids_V)
    is_deferred = logits_BV.device.type != "cpu"
    if is_deferred:
        is_bad_B = ~torch.isfinite(logits_BV.amax(-1))
        logits_BV = logits_BV.masked_fill(is_bad_B[:, None], 0.0)
    order, parts = list[int](), list[Tensor]()
    pairs: list[Pairs] = [()] * len(params)
    drawn_from: list[tuple[list[int], Tensor]] = []
    for contract in set(params.contracts):
        rows = [row for row, each in enumerate(params.contracts) if each is contract]
        row_params = params.take(rows)
        index = slice(None) if len(rows) == len(params) else torch.tensor(rows, device=logits_BV.device)  # no copy
        position_N = torch.tensor([positions_B[row] for row in rows], device=logits_BV.device)
        try:
            if contract is Contract.GREEDY:
                column_N = greedy_tokens(logits_BV[index], are_finite=is_deferred)
            elif contract is Contract.COUPLED:
                column_N = coupled_tokens(
                    logits_BV[index], row_params, position_N, draft_token_ids_V, are_finite=is_deferred
                )
            else:
                column_N, q_2NS = _draw_ratio(
                    logits_BV[index], draft_token_ids_V, row_params, position_N, top_n, is_deferred
                )
                drawn_from.append((rows, q_2NS))
        except BadLogits as error:
            raise BadLogits([rows[row] for row in error.rows]) from None
        token_N = draft_token_ids_V[column_N]
        parts.append(token_N.masked_fill(is_bad_B[index], BAD_ROW) if is_deferred else token_N)
        order += rows
    drawn = dict(zip(order, torch.cat(parts).tolist(), strict=True))
    if bad := [row for row, token in drawn.items() if token == BAD_ROW]:
        raise BadLogits(bad)
    for rows, q_2NS in drawn_from:
        for row, ids, probs in zip(rows, *q_2NS.tolist(), strict=True):
            pairs[row] = tuple((int(token), prob) for token, prob in zip(ids, probs, strict=True) if prob > 0.0)
    return Proposals(tokens=[drawn[row] for row in range(len(params))], pairs=pairs)


def _draw_ratio(
    logits_NV: Tensor, token_ids_V: Tensor, params: RowParams, position_N: Tensor, top_n: int, are_finite: bool
) -> tuple[Tensor, Tensor]:
    """Columns [N] drawn from the renormalised top n, and that distribution: ids and probabilities [2, N, n].

    Ids are whole numbers below 2^53: float64 holds them.
    """
    top_NS, column_NS = logits_NV.topk(min(top_n, logits_NV.shape[-1]), dim=-1)
    prob_NS = target_probs(top_NS, params, are_finite=are_finite)
    place_N = inverse_cdf(prob_NS, uniforms(params.keys(position_N, Purpose.DRAFT)))
    column_N = column_NS.gather(-1, place_N[:, None])[:, 0]
    return column_N, torch.stack((token_ids_V[column_NS].double(), prob_NS))
