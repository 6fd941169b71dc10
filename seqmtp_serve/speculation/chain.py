"""Exact selection for a batch of draft chains: accepted drafts and one more token for every request.

Row j of a request judges its draft j; the row after its last draft gives the bonus. Rows are looked at depth by depth,
and only for requests whose drafts were all accepted so far: a row after a rejection has a rejected token in its
context, so it means nothing.

`plain.py` holds the same rule for one request in plain Python.

Shapes: B requests, K drafts, R = K + 1 rows, V tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seqmtp_serve.errors import ProtocolError
from seqmtp_serve.speculation.choose import NO_DRAFT, choose_tokens
from seqmtp_serve.speculation.distributions import BadLogits
from seqmtp_serve.speculation.row_params import RowParams
from seqmtp_serve.speculation.shaping import Shaper
from seqmtp_serve.speculation.sparse_q import SparseQ


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What each request's rows yielded: `accepted[b]` drafts, then one correction, bonus or plain next token.

    `num_clamped` counts rejections turned into acceptances because p and q differed by rounding only.
    """

    tokens: list[list[int]]
    accepted: list[int]
    num_clamped: int = 0


def select_chain(
    logits_BRV: Tensor,
    draft_ids_BK: Tensor,
    draft_len_B: Sequence[int],
    q: SparseQ | None,
    params: RowParams,
    positions_B: Sequence[int],
    shaper: Shaper | None = None,
) -> Selection:
    """Select for every request; contracts and draft lengths mix freely, and K may be 0 (plain decoding, bootstrap).

    `shaper` shapes each row by what comes before it, in a copy: `logits_BRV` stays as the model gave it.

    `positions_B[b]` is the absolute position (index in prompt + output) of the first token chosen for b. Rows past
    draft_len are never read. Pure: the same arguments give the same selection, whatever else is in the batch.

    Raises BadLogits naming requests whose logits cannot be sampled from: drop them and call again for the others.
    Raises ProtocolError for a draft that `check_draft` would have refused.
    """
    num_requests, num_rows, vocab_size = logits_BRV.shape
    drafts = [row[:length] for row, length in zip(draft_ids_BK.tolist(), draft_len_B, strict=True)]
    assert len(params) == num_requests
    assert max(draft_len_B, default=0) < num_rows
    if any(not 0 <= token < vocab_size for chain in drafts for token in chain):
        raise ProtocolError("a draft token is outside the vocabulary")
    tokens: list[list[int]] = [[] for _ in range(num_requests)]
    alive, num_clamped = list(range(num_requests)), 0
    for depth in range(num_rows):
        if not alive:
            break
        judged = [drafts[b][depth] if depth < len(drafts[b]) else NO_DRAFT for b in alive]
        logits_NV = logits_BRV[:, depth] if len(alive) == num_requests else logits_BRV[alive, depth]
        try:
            choices = choose_tokens(
                logits_NV if shaper is None else shaper.shape(logits_NV, alive),
                params.take(alive),
                [positions_B[b] + depth for b in alive],
                judged,
                *_q_rows(q, alive, depth, judged, logits_BRV.device),
            )
        except BadLogits as error:
            raise BadLogits([alive[row] for row in error.rows]) from None
        num_clamped += choices.num_clamped
        for b, token in zip(alive, choices.tokens, strict=True):
            tokens[b].append(token)
        alive = [b for b, token, draft in zip(alive, choices.tokens, judged, strict=True) if token == draft]
        if shaper is not None:
            for b in alive:
                shaper.advance(b, tokens[b][-1])
    return Selection(tokens=tokens, accepted=[len(each) - 1 for each in tokens], num_clamped=num_clamped)


def _q_rows(
    q: SparseQ | None, alive: list[int], depth: int, judged: list[int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """q of the rows that judge a draft at this depth: tokens and probabilities [N, n], all 0 for the others."""
    if q is None or depth >= q.tokens_BKn.shape[1]:
        shape = (len(alive), 1)
        return torch.zeros(shape, dtype=torch.int64, device=device), torch.zeros(
            shape, dtype=torch.float64, device=device
        )
    is_unused_N = torch.tensor([draft == NO_DRAFT for draft in judged], device=device)
    probs_Nn = q.probs_BKn[alive, depth].masked_fill(is_unused_N[:, None], 0.0)
    return q.tokens_BKn[alive, depth], probs_Nn
