"""From logits to the distribution that is sampled: bans, temperature, top-k, top-p, min-p, in this order.

* top-k keeps the tokens whose logit is at least the k-th largest; top-p the smallest set of largest tokens, among those
  and renormalised over them, whose probability reaches top_p (the token that crosses it stays); min-p those at least
  min_p times as probable as the most probable one. This is the order of transformers' logits warpers; vLLM applies
  min-p before top-k.
* Tokens tied at a cut all stay, so the outcome never depends on how a sort breaks ties.
* -inf is a mask: such a token has probability zero. NaN, +inf, or a row with every token masked is BadLogits.

Probabilities are float64: a float32 softmax over 49,152 tokens does not sum to one within 1e-12.

Shapes: N rows, V tokens (the vocabulary, or a draft's part of it).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seqmtp_serve.errors import InternalError
from seqmtp_serve.speculation.row_params import RowParams

_FIRST_NUCLEUS = 512  # tokens ranked at first when looking for a top-p set
_NUCLEUS_GROWTH = 8
_BLOCK = 256  # columns per block in `first_argmax`


class BadLogits(InternalError):
    """Rows whose logits hold NaN or +inf, or allow no token at all; `rows` are their indices in the batch given."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(f"logits of rows {list(rows)} hold NaN or +inf, or allow no token; end these requests")
        self.rows = tuple(rows)


def ban_tokens(
    logits_NV: Tensor, params: RowParams, positions: Sequence[int], token_ids_V: Tensor | None = None
) -> Tensor:
    """The logits with each row's banned tokens at -inf; the very same tensor when no ban applies.

    `token_ids_V` are the ids of the columns; without it columns are ids.
    """
    active = {
        row: ban.token_ids
        for row, (ban, position) in enumerate(zip(params.bans, positions, strict=True))
        if ban is not None and position < ban.before
    }
    if not active:
        return logits_NV
    logits_NV = logits_NV.clone()
    if token_ids_V is None:
        token_ids_V = torch.arange(logits_NV.shape[-1], device=logits_NV.device)
    for row, banned in active.items():
        is_banned_V = torch.isin(token_ids_V, torch.tensor(banned, device=token_ids_V.device))
        logits_NV[row].masked_fill_(is_banned_V, float("-inf"))
    return logits_NV


def filtered_logits(logits_NV: Tensor, params: RowParams, *, are_finite: bool = False) -> Tensor:
    """log p + a constant for each row, float64 [N, V]: shifted to a maximum of 0, tempered, -inf outside the filters.

    Raises BadLogits, unless the caller knows that all maxima `are_finite`: on a GPU, asking makes the host wait.
    """
    top_N = logits_NV.amax(-1)
    if not are_finite:
        raise_unless_finite(top_N)
    scaled_NV = logits_NV.to(torch.float64, copy=True)
    scaled_NV.sub_(top_N[:, None]).div_(params.temperature_N[:, None])
    if not any(params.is_filtered):
        return scaled_NV
    applies_all = scaled_NV.device.type != "cpu"  # neutral ones change nothing; whether all are is not known here
    if applies_all or bool(((params.top_k_N > 0) | (params.top_p_N < 1.0)).any()):
        threshold_N = _rank_threshold(scaled_NV, params.top_k_N, params.top_p_N)
        scaled_NV.masked_fill_(scaled_NV < threshold_N[:, None], float("-inf"))
    if applies_all or bool((params.min_p_N > 0.0).any()):
        scaled_NV.masked_fill_(scaled_NV < params.min_p_N.log()[:, None], float("-inf"))
    return scaled_NV


def target_probs(logits_NV: Tensor, params: RowParams, *, are_finite: bool = False) -> Tensor:
    """The distribution each row is sampled from, float64 [N, V]. Raises BadLogits as `filtered_logits` does."""
    weight_NV = filtered_logits(logits_NV, params, are_finite=are_finite).exp_()
    return weight_NV.div_(weight_NV.sum(-1, keepdim=True))


def first_argmax(values_NV: Tensor) -> tuple[Tensor, Tensor]:
    """(index, value) [N] of each row's maximum: the lowest index among equals, NaN above all else.

    Two levels, as torch's amax is vectorised on CPU and its argmax is not: 40 times faster at V = 49152.
    """
    num_columns = values_NV.shape[-1]
    if num_columns <= _BLOCK:
        index_N = values_NV.argmax(-1)
    else:
        num_blocks = num_columns // _BLOCK
        head_NV, tail_NV = values_NV[:, : num_blocks * _BLOCK], values_NV[:, num_blocks * _BLOCK :]
        maxima = [head_NV.view(-1, num_blocks, _BLOCK).amax(-1)]
        if tail_NV.shape[-1]:
            maxima.append(tail_NV.amax(-1, keepdim=True))
        block_N = torch.cat(maxima, -1).argmax(-1)
        # The last window reaches back into a block whose values are all smaller, so it cannot win there.
        start_N = (block_N * _BLOCK).clamp_max(num_columns - _BLOCK)
        window_NW = start_N[:, None] + torch.arange(_BLOCK, device=values_NV.device)
        index_N = start_N + values_NV.gather(-1, window_NW).argmax(-1)
    return index_N, values_NV.gather(-1, index_N[:, None])[:, 0]


def inverse_cdf(weight_NV: Tensor, u_N: Tensor) -> Tensor:
    """The first token [N] whose cumulative weight exceeds u times the total. Weights need not be normalised.

    u < 1 in float64 makes u * total < total after rounding, so such a token exists, and it has positive weight.
    """
    cumulative_NV = weight_NV.cumsum(-1).masked_fill_(weight_NV <= 0.0, 0.0)
    beyond_NV = cumulative_NV > (u_N * cumulative_NV.amax(-1))[:, None]
    return beyond_NV.to(torch.uint8).argmax(-1)


def raise_unless_finite(top_N: Tensor) -> None:
    """Raise BadLogits naming the rows whose maximum is not finite (amax passes NaN on)."""
    is_bad_N = ~torch.isfinite(top_N)
    if bool(is_bad_N.any()):
        raise BadLogits(is_bad_N.nonzero()[:, 0].tolist())


def _rank_threshold(scaled_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor) -> Tensor:
    """The smallest scaled logit [N] that top-k and top-p keep. On a CPU it ranks no more tokens than it needs to; a GPU
    ranks all of them sooner than the host hears how many that is."""
    num_columns = scaled_NV.shape[-1]
    k_N = torch.where(top_k_N > 0, top_k_N.clamp_max(num_columns), num_columns)
    uncut_N = scaled_NV.exp().sum(-1)
    num_ranked = num_columns
    if scaled_NV.device.type == "cpu":
        num_ranked = int(torch.where(top_k_N > 0, k_N, min(num_columns, _FIRST_NUCLEUS)).max())
    while True:
        ranked_NS = scaled_NV.topk(num_ranked, dim=-1).values  # descending
        within_k_NS = torch.arange(num_ranked, device=scaled_NV.device) < k_N[:, None]
        mass_NS = ranked_NS.exp().masked_fill_(~within_k_NS, 0.0)
        total_N = torch.where(k_N <= num_ranked, mass_NS.sum(-1), uncut_N)
        before_NS = mass_NS.cumsum(-1).roll(1, dims=-1)
        before_NS[:, 0] = 0.0
        within_p_NS = (before_NS < (top_p_N * total_N)[:, None]) | (top_p_N >= 1.0)[:, None]
        num_kept_N = (within_k_NS & within_p_NS).sum(-1)
        is_found_N = (num_kept_N < num_ranked) | (k_N <= num_ranked)
        if num_ranked == num_columns or bool(is_found_N.all()):
            return ranked_NS.gather(-1, num_kept_N[:, None] - 1)[:, 0]
        num_ranked = min(num_columns, num_ranked * _NUCLEUS_GROWTH)
