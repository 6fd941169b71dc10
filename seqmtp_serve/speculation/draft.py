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
from seqmtp_serve.speculation.choose import coupled_tokens, greedy_tokens
from seqmtp_serve.speculation.distributions import ban_tokens, inverse_cdf, target_probs
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
    `shapings`, one a row, are followed as far as they need no context. Raises BadLogits.
    """
    logits_BV = lightly_shaped(logits_BV, shapings, draft_token_ids_V)
    logits_BV = ban_tokens(logits_BV, params, positions_B, draft_token_ids_V)
    tokens = [0] * len(params)
    pairs: list[Pairs] = [()] * len(params)
    for contract in set(params.contracts):
        rows = [row for row, each in enumerate(params.contracts) if each is contract]
        row_params = params.take(rows)
        position_N = torch.tensor([positions_B[row] for row in rows], device=logits_BV.device)
        if contract is Contract.GREEDY:
            column_N = greedy_tokens(logits_BV[rows])
        elif contract is Contract.COUPLED:
            column_N = coupled_tokens(logits_BV[rows], row_params, position_N, draft_token_ids_V)
        else:
            column_N, row_pairs = _draw_ratio(logits_BV[rows], draft_token_ids_V, row_params, position_N, top_n)
            for row, each in zip(rows, row_pairs, strict=True):
                pairs[row] = each
        for row, token in zip(rows, draft_token_ids_V[column_N].tolist(), strict=True):
            tokens[row] = token
    return Proposals(tokens=tokens, pairs=pairs)


def _draw_ratio(
    logits_NV: Tensor, token_ids_V: Tensor, params: RowParams, position_N: Tensor, top_n: int
) -> tuple[Tensor, list[Pairs]]:
    """Columns [N] drawn from the renormalised top n, and that distribution."""
    top_NS, column_NS = logits_NV.topk(min(top_n, logits_NV.shape[-1]), dim=-1)
    prob_NS = target_probs(top_NS, params)
    place_N = inverse_cdf(prob_NS, uniforms(params.keys(position_N, Purpose.DRAFT)))
    ids, probs = token_ids_V[column_NS].tolist(), prob_NS.tolist()
    pairs = [
        tuple((token, prob) for token, prob in zip(*row, strict=True) if prob > 0.0)
        for row in zip(ids, probs, strict=True)
    ]
    return column_NS.gather(-1, place_N[:, None])[:, 0], pairs
