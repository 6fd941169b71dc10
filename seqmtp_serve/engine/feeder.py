"""The target's side of drafting: which hidden rows the proposer has, which it needs, and which drafts may be used.

A proposer is fed every row of a sequence exactly once and in order, from the first one that the window leaves: a
prompt's with each chunk of its prefill, so the proposer works on a chunk while the target computes the next. Rows are
read from the pages, so a row whose next token was not known yet (the last of the prompt, the last kept by a round) is
fed later without being carried around, and a proposer that was replaced is given the whole window again.

Shapes: n rows, d hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from seqmtp_serve.engine.caches import PagedCache
from seqmtp_serve.engine.hidden_rows import HiddenPolicy, num_bytes, pack
from seqmtp_serve.engine.sequences import TargetSequence
from seqmtp_serve.errors import ProtocolError
from seqmtp_serve.ports import Draft, FeedRows, Proposer
from seqmtp_serve.speculation.draft_chances import num_worth
from seqmtp_serve.speculation.sparse_q import check_draft

CHUNK = 256  # rows of one feed
DEFERRED_ROWS = 64  # rows kept back while nobody wants drafts; then they are fed together: cheaper than one at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The drafts that a sequence's next round will ask for (None: as many as it can use), and where a chain ends."""

    depth: int | None = None
    floor: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What a round wants of the proposer: at most `depth` drafts, none from the first whose chance is below `floor`."""

    sequence: TargetSequence
    depth: int
    floor: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """What the proposer drafted for a round, and what of it is worth a row (None: nothing)."""

    all: Draft
    draft: Draft | None


class Feeder:
    """Keeps one proposer fed. With `proposer` None it feeds nobody and collects nothing."""

    def __init__(
        self,
        proposer: Proposer | None,
        cache: PagedCache,
        *,
        vocab_size: int,
        max_depth: int,
        max_len: int,
        hidden: HiddenPolicy,
    ) -> None:
        self._proposer, self._cache = proposer, cache
        self._vocab_size, self._max_depth, self._max_len = vocab_size, max_depth, max_len
        self._hidden = hidden
        self._closed: list[str] = []
        self.num_refused_drafts = 0
        self.num_fed_rows = self.num_fed_bytes = 0  # so far

    @property
    def ready(self) -> bool:
        """Whether drafts can be hoped for."""
        return self._proposer is not None and self._proposer.ready

    def close(self, request_id: str) -> None:
        """Tell the proposer, with the next feed, to forget the request."""
        self._closed.append(request_id)

    def feed(self, wishes: Iterable[tuple[TargetSequence, Wish]]) -> None:
        """Hand over the rows whose next token is known, and ask for the next round's drafts. Returns at once.

        Where a sequence wishes none, or they are copied, few rows may wait for a later feed.
        """
        if self._proposer is None:
            return
        ready = self._proposer.ready
        feeds = [feed for sequence, wish in wishes for feed in self._rows_of(sequence, wish)] if ready else []
        self.num_fed_rows += sum(len(feed.next_ids) for feed in feeds)
        self.num_fed_bytes += sum(num_bytes(feed.hidden, feed.hidden_scales) for feed in feeds)
        if feeds or self._closed:
            self._proposer.feed(feeds, tuple(self._closed))
            self._closed.clear()

    def collect(self, wanted: Mapping[str, Want], timeout_s: float) -> dict[str, Proposed]:
        """Drafts by request id; a draft that may not be verified is dropped."""
        sequences = [one.sequence for one in wanted.values() if one.depth]
        refs = [sequence.ref for sequence in sequences if sequence.draft_ref == sequence.ref]
        if self._proposer is None or not refs:
            return {}
        collected = self._proposer.collect(refs, max(0.0, timeout_s))
        drafts = {}
        for ref in refs:
            draft = collected.get(ref.request_id)
            if draft is None or not draft.tokens:
                continue
            try:
                drafts[ref.request_id] = self._checked(draft, wanted[ref.request_id])
            except ProtocolError:
                self.num_refused_drafts += 1
        return drafts

    def _checked(self, draft: Draft, want: Want) -> Proposed:
        """The first tokens of a draft of this very state."""
        want.sequence.require(draft.ref)
        draft = _first(draft, want.depth)
        check_draft(draft, want.sequence.request.params.contract, self._vocab_size)
        kept = _first(draft, num_worth(draft.chances, want.floor)) if draft.chances else draft
        return Proposed(all=draft, draft=kept if kept.tokens else None)

    def _rows_of(self, sequence: TargetSequence, wish: Wish) -> Iterator[FeedRows]:
        """Feeds of at most `CHUNK` rows; the last one asks for drafts if the next round can use any."""
        assert self._proposer is not None
        if min(self._max_depth, sequence.request.params.max_depth) == 0:
            return
        generation = self._proposer.generation
        is_reset = sequence.fed_generation != generation
        known = sequence.known_tokens
        stop = min(sequence.num_computed, len(known) - 1)
        opening = self._hidden.first_base(sequence.num_prefix, stop)
        first = opening if is_reset else sequence.fed_bases
        ref = sequence.pending.ref if sequence.pending else sequence.ref
        depth = self._next_depth(sequence, wish.depth)
        may_wait = wish.depth == 0 or sequence.copy is not None
        if may_wait and sequence.is_bootstrapped and stop - first < DEFERRED_ROWS:
            return
        for start in range(first, stop, CHUNK):
            chunk_stop = min(start + CHUNK, stop)
            opens = is_reset and start == opening
            rows_nd, scales_n = pack(self._cache.hidden(sequence.lease, start, chunk_stop), self._hidden.dtype)
            yield FeedRows(
                ref=ref,
                first_base=start,
                hidden=rows_nd,
                hidden_scales=scales_n,
                next_ids=tuple(known[start + 1 : chunk_stop + 1]),
                depth=depth if chunk_stop == stop else 0,
                floor=wish.floor,
                reset=opens,
                request=replace(sequence.request, prediction_ids=()) if opens else None,
            )
        if stop > first:
            sequence.fed_bases, sequence.fed_generation = stop, generation
            sequence.draft_ref = ref if depth else None

    def _next_depth(self, sequence: TargetSequence, wish: int | None) -> int:
        """Drafts to ask for: those the next round can use.

        None while the request's own prediction proves right, where the drafts are copied, or where its grammar forces
        as many: the rows are kept, and drafts asked for when they are needed.
        """
        if sequence.is_predicted or sequence.copy is not None:
            return 0
        most = min(self._max_depth, sequence.request.params.max_depth)
        depth = sequence.num_draftable(most if wish is None else min(wish, most), self._max_len)
        return 0 if depth and len(sequence.forced()) >= depth else depth


def _first(draft: Draft, depth: int) -> Draft:
    return replace(
        draft, tokens=draft.tokens[:depth], draft_probs=draft.draft_probs[:depth], chances=draft.chances[:depth]
    )
