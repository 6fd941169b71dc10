"""One pass of the target: prefill chunks and verify rows of many sequences, side by side.

Shapes: B sequences that choose tokens in this pass, R rows of each (drafts + 1, padded), n rows that need logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from seqmtp_serve.engine.feeder import Wish
from seqmtp_serve.engine.own_drafts import Chosen
from seqmtp_serve.engine.sequences import TargetSequence
from seqmtp_serve.errors import InternalError, NoTokenLeft, SeqMTPError
from seqmtp_serve.ports import Draft, Prefill, Verify
from seqmtp_serve.request import Contract
from seqmtp_serve.speculation.chain import Selection, select_chain
from seqmtp_serve.speculation.distributions import BadLogits
from seqmtp_serve.speculation.row_params import RecentRowParams
from seqmtp_serve.speculation.shaping import Shaper
from seqmtp_serve.speculation.sparse_q import SparseQ


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Consecutive rows of one sequence from `start` on; `chooses` says whether tokens are chosen after them.

    A round's rows are the frontier and its drafts. A bootstrap chooses after the last prompt row, with no draft.
    `next`: drafts for the round after this pass. `proposed`: what the proposer drafted, whether or not it is verified.
    """

    sequence: TargetSequence
    start: int
    token_ids: Sequence[int]
    chooses: bool = True
    draft: Draft | None = None
    next: Wish = field(default_factory=Wish)
    proposed: Draft | None = None
    num_forced: int = 0  # drafts, from the first, that the request's grammar forces
    is_predicted: bool = False  # the draft is the request's prediction
    is_copied: bool = False  # those behind the forced ones come from the request's own text

    @property
    def module_draft(self) -> int | None:
        """The first draft of a proposer's, verified or left out; None where the round has others before it."""
        if self.proposed is None or self.num_forced or self.is_predicted or self.is_copied:
            return None
        return self.proposed.tokens[0]

    @property
    def drafts(self) -> tuple[int, ...]:
        """Draft tokens under verification."""
        return self.draft.tokens if self.draft else ()


def prefill_item(prefill: Prefill, sequence: TargetSequence) -> Item:
    """The rows of a chunk that no other sequence has computed."""
    start = max(prefill.start, sequence.num_cached)
    return Item(
        sequence=sequence,
        start=start,
        token_ids=sequence.tokens[start : prefill.stop],
        chooses=prefill.last and not sequence.is_bootstrapped,
        next=Wish(depth=prefill.next_depth, floor=prefill.next_floor),
    )


def round_item(verify: Verify, sequence: TargetSequence, chosen: Chosen, proposed: Draft | None = None) -> Item:
    """The frontier and the drafts chosen for it; `proposed` is all that the proposer made."""
    draft = None if chosen.draft is None else within_grammar(chosen.draft, sequence)
    drafts = draft.tokens if draft else ()
    num_forced = min(chosen.num_forced, len(drafts))
    return Item(
        sequence=sequence,
        start=sequence.length,
        token_ids=(sequence.tokens[-1], *drafts),
        draft=draft,
        next=Wish(depth=verify.next_depth, floor=verify.next_floor),
        proposed=proposed,
        num_forced=num_forced,
        is_predicted=chosen.is_predicted,
        is_copied=chosen.is_copied and len(drafts) > num_forced,
    )


def logit_rows(items: Sequence[Item]) -> Tensor:
    """Indices `[n]` of the pass's rows that choose a token: the last `drafts + 1` rows of each choosing item."""
    rows: list[int] = []
    stop = 0
    for item in items:
        stop += len(item.token_ids)
        if item.chooses:
            rows.extend(range(stop - len(item.drafts) - 1, stop))
    return torch.tensor(rows, dtype=torch.int64)


def select(
    logits_nV: Tensor, items: Sequence[Item], row_params: RecentRowParams
) -> tuple[dict[str, list[int]], dict[str, SeqMTPError]]:
    """Exact selection for the choosing `items`, whose rows `logits_nV` holds one after the other.

    Returns the tokens by request id, and the requests whose logits cannot be sampled from, each with the reason.
    """
    first, logit_row = 0, []
    num_rows = 1 + max(len(item.drafts) for item in items)
    for item in items:
        last = first + len(item.drafts)
        logit_row.append([min(first + row, last) for row in range(num_rows)])
        first = last + 1
    remaining, bad = list(range(len(items))), dict[str, SeqMTPError]()
    while remaining:
        chosen = [items[b] for b in remaining]
        if len(chosen) == len(items) and len(items) * num_rows == len(logits_nV):  # they lie as they are wanted
            logits_BRV = logits_nV.view(len(chosen), num_rows, -1)
        else:
            logits_BRV = logits_nV[torch.tensor([logit_row[b] for b in remaining], device=logits_nV.device)]
        try:
            selection = _select(logits_BRV, chosen, num_rows - 1, row_params)
        except BadLogits as error:
            failed = {remaining[row] for row in error.rows}
            bad |= {
                items[b].sequence.request.request_id: _reason(logits_nV[logit_row[b][0] : logit_row[b][-1] + 1])
                for b in failed
            }
            remaining = [b for b in remaining if b not in failed]
            continue
        tokens = zip(chosen, selection.tokens, strict=True)
        return {item.sequence.request.request_id: row for item, row in tokens}, bad
    return {}, bad


def _reason(logits_RV: Tensor) -> SeqMTPError:
    """Why no token can be drawn: the model's own rows are broken, or the request left none of their tokens."""
    if bool(torch.isfinite(logits_RV.amax(-1)).all()):
        return NoTokenLeft("the tokens this request allows, bans and asks for leave none that may come")
    return InternalError("the target's logits are not finite")


def _select(logits_BRV: Tensor, items: Sequence[Item], depth: int, row_params: RecentRowParams) -> Selection:
    drafts = [item.drafts + (0,) * (depth - len(item.drafts)) for item in items]
    requests = [item.sequence.request for item in items]
    device = logits_BRV.device
    chains = [item.draft.draft_probs if item.draft else () for item in items]
    needs_q = depth and any(request.params.contract is Contract.RATIO for request in requests)
    return select_chain(
        logits_BRV,
        torch.tensor(drafts, dtype=torch.int64).reshape(len(items), depth),
        [len(item.drafts) for item in items],
        SparseQ.stack(chains, depth, device) if needs_q else None,
        row_params.of(requests),
        [item.start + len(item.token_ids) - len(item.drafts) for item in items],
        _shaper(items),
    )


def within_grammar(draft: Draft, sequence: TargetSequence) -> Draft:
    """The draft as far as the sequence's grammar takes it: rows behind a token that cannot come are wasted.

    Under `ratio` that token itself stays. It is sure to be rejected, and the correction after a rejection is not drawn
    from p: leaving the token out would skew the text.
    """
    state = sequence.shaping
    if state is None or state.grammar is None:
        return draft
    state.catch_up(sequence.tokens)
    keep = state.grammar.num_legal(draft.tokens) + (sequence.request.params.contract is Contract.RATIO)
    return replace(draft, tokens=draft.tokens[:keep], draft_probs=draft.draft_probs[:keep])


def _shaper(items: Sequence[Item]) -> Shaper | None:
    """The shapings of these items, caught up with what is committed; None when nobody has any."""
    states = [item.sequence.shaping for item in items]
    for item, state in zip(items, states, strict=True):
        if state is not None:
            state.catch_up(item.sequence.tokens)
    return Shaper(states) if any(states) else None
