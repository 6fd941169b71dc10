"""Exact selection for a batch of draft chains: accepted drafts and one more token for every request.

Row j of a request judges its draft j; the row after its last draft gives the bonus. Rows are looked at depth by depth,
and only for requests whose drafts were all accepted so far: a row after a rejection has a rejected token in its
context, so it means nothing. On a GPU all rows are chosen at once, and those that mean nothing are passed over when the
tokens have arrived: one transfer, where looking costs one a depth. Rows that are shaped by the drafts before them have
to be looked at there too.

`plain.py` holds the same rule for one request in plain Python.

Shapes: B requests, K drafts, R = K + 1 rows, V tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seqmtp_serve.errors import ProtocolError
from seqmtp_serve.speculation.choose import BAD_ROW, NO_DRAFT, OUTSIDE_Q, choose_tokens, choose_unseen
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
    if shaper is None and logits_BRV.device.type != "cpu":
        return select_at_once(logits_BRV, drafts, q, params, positions_B)
    tokens: list[list[int]] = [[] for _ in range(num_requests)]
    alive, num_clamped = list(range(num_requests)), 0
    for depth in range(num_rows):
        if not alive:
            break
        judged = [drafts[b][depth] if depth < len(drafts[b]) else NO_DRAFT for b in alive]
        index_N = torch.tensor(alive, device=logits_BRV.device)
        logits_NV = logits_BRV[:, depth] if len(alive) == num_requests else logits_BRV[index_N, depth]
        try:
            choices = choose_tokens(
                logits_NV if shaper is None else shaper.shape(logits_NV, alive),
                params.take(alive),
                [positions_B[b] + depth for b in alive],
                judged,
                *_q_rows(q, index_N, depth, judged),
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


def select_at_once(
    logits_BRV: Tensor,
    drafts: Sequence[Sequence[int]],
    q: SparseQ | None,
    params: RowParams,
    positions_B: Sequence[int],
) -> Selection:
    """`select_chain` without a shaper and in one transfer. Raises as it does, with all bad requests at once."""
    places = [(b, depth) for b, chain in enumerate(drafts) for depth in range(len(chain) + 1)]
    judged = [drafts[b][depth] if depth < len(drafts[b]) else NO_DRAFT for b, depth in places]
    index_2N = torch.tensor(places, device=logits_BRV.device).T
    outcome_2N = choose_unseen(
        logits_BRV[index_2N[0], index_2N[1]],
        params.take([b for b, _ in places]),
        [positions_B[b] + depth for b, depth in places],
        judged,
        *_q_rows(q, index_2N[0], index_2N[1], judged),
    )
    chosen, clamped = outcome_2N.tolist()
    tokens: list[list[int]] = [[] for _ in drafts]
    num_clamped, bad = 0, list[int]()
    goes_on = [True] * len(drafts)
    for (b, _), draft, token, is_clamped in zip(places, judged, chosen, clamped, strict=True):
        if not goes_on[b]:
            continue
        if token == OUTSIDE_Q:
            raise ProtocolError("a draft token has probability 0 in its own distribution")
        if token == BAD_ROW:
            bad.append(b)
        tokens[b].append(token)
        num_clamped += is_clamped
        goes_on[b] = token == draft
    if bad:
        raise BadLogits(bad)
    return Selection(tokens=tokens, accepted=[len(each) - 1 for each in tokens], num_clamped=num_clamped)


def _q_rows(q: SparseQ | None, index_N: Tensor, depth: Tensor | int, judged: Sequence[int]) -> tuple[Tensor, Tensor]:
    """q of rows at a depth each, or all at one: tokens and probabilities [N, n], all 0 where no draft is judged."""
    if q is None or not q.tokens_BKn.shape[1] or all(draft == NO_DRAFT for draft in judged):
        zeros_N1 = torch.zeros(len(judged), 1, dtype=torch.int64, device=index_N.device)
        return zeros_N1, zeros_N1.double()
    if isinstance(depth, Tensor):
        depth = depth.clamp_max(q.tokens_BKn.shape[1] - 1)  # a bonus row's, which has no q
    is_unused_N = torch.tensor([draft == NO_DRAFT for draft in judged], device=index_N.device)
    probs_Nn = q.probs_BKn[index_N, depth].masked_fill(is_unused_N[:, None], 0.0)
    return q.tokens_BKn[index_N, depth], probs_Nn
