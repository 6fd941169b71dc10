"""The proposer engine: the MTP module over its own pages, for the sequences of one or many targets.

Rows fed by a target are canonical: each is computed once from true target features. Drafting past the first token feeds
the module's own output back ("recurrent" policy); those rows are provisional, lie above the canonical ones, are never
counted, and are overwritten by the next feed, whether their tokens were accepted or not.

Slot rule: the key and value of base i lie at slot i + 1, the position of the newest token the row consumed, so a slot
depends on the same tokens as the target's slot of that number. Slot 0 is never read. RoPE position is i.

Shapes: N rows of a pass, d hidden, Vd draft vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from seqmtp_serve.config import EngineConfig
from seqmtp_serve.engine.caches import PagedCache
from seqmtp_serve.engine.pages import Lease, Owner
from seqmtp_serve.errors import InternalError, ProtocolError, SeqMTPError, StaleVersion
from seqmtp_serve.model.attention import Span
from seqmtp_serve.model.config import LlamaConfig, MtpConfig
from seqmtp_serve.model.mtp import MtpModule
from seqmtp_serve.model.probe import probe
from seqmtp_serve.ports import Draft, FeedRows
from seqmtp_serve.request import Ref, Request
from seqmtp_serve.speculation.distributions import BadLogits
from seqmtp_serve.speculation.draft import propose_tokens
from seqmtp_serve.speculation.row_params import RowParams

PASS_ROWS = 512  # bounds the memory of one pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A feed that was not taken, and why. The sequence is closed: it must be opened anew with a reset feed."""

    ref: Ref
    code: str
    message: str


@dataclass(slots=True, kw_only=True)
class MtpSequence:
    """One sequence: canonical rows of bases `first_base .. next_base - 1`."""

    ref: Ref
    request: Request
    lease: Lease
    first_base: int
    next_base: int


@dataclass(slots=True, kw_only=True)
class _Job:
    """What one call of `propose` does for one sequence."""

    sequence: MtpSequence
    first_base: int
    hidden: list[Tensor] = field(default_factory=list)  # each [n, d]
    next_ids: list[int] = field(default_factory=list)
    is_asked: bool = False  # drafts were asked for, even if the context has no room for any
    depth: int = 0
    tokens: list[int] = field(default_factory=list)
    pairs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    last_d: Tensor | None = None  # the newest output row


class ProposerEngine:
    """Synchronous, single-threaded, and without IO."""

    def __init__(self, config: EngineConfig, model: LlamaConfig, mtp: MtpConfig, tensors: Mapping[str, Tensor]) -> None:
        torch.set_num_threads(config.num_threads)
        self.config, self.model = config, model
        self._max_len = min(config.max_model_len, model.max_position)
        self._module = MtpModule(tensors, model, mtp, config.page_size, self._max_len, probe(config))
        self._cache = PagedCache(Owner.MTP, config, model, 1)
        self._sequences: dict[str, MtpSequence] = {}

    @torch.inference_mode()
    def propose(self, feeds: Sequence[FeedRows], closed: Sequence[str] = ()) -> list[Draft | Refusal]:
        """Forget `closed`, take the feeds in order, and draft for each sequence as its newest feed wishes.

        One canonical pass over all fed rows (several of `PASS_ROWS` if there are many), then one recurrent pass for
        each further draft depth. A feed that does not follow its sequence is answered with a Refusal; the others go on.
        The time of the whole call is split evenly over its drafts' `mtp_ms`.
        """
        started = time.perf_counter()
        for request_id in closed:
            self._close(request_id)
        refusals: list[Refusal] = []
        jobs = self._take(feeds, refusals)
        self._run_canonical(list(jobs.values()))
        drafting = [job for job in jobs.values() if job.depth > 0]
        num_drafts = len(drafting)
        while drafting:
            drafting = self._draft_one(drafting, jobs, refusals)
        share_ms = (time.perf_counter() - started) * 1e3 / max(1, num_drafts)
        drafts = [
            Draft(ref=job.sequence.ref, tokens=tuple(job.tokens), draft_probs=_probs(job), mtp_ms=share_ms)
            for job in jobs.values()
            if job.is_asked
        ]
        return [*drafts, *refusals]

    @property
    def num_sequences(self) -> int:
        """Sequences that are open."""
        return len(self._sequences)

    @property
    def num_held_pages(self) -> int:
        """Pages they hold."""
        return self._cache.pool.num_pages - self._cache.pool.num_free

    def check(self) -> None:
        """Assert the invariants of pages and lengths."""
        pool = self._cache.pool
        pool.check()
        held = 0
        for sequence in self._sequences.values():
            pages = pool.pages(sequence.lease)
            held += len(pages)
            assert sequence.first_base <= sequence.next_base < len(pages) * pool.page_size
        assert held == pool.num_pages - pool.num_free, "pages are held for a sequence nobody knows"

    # ---- taking feeds

    def _take(self, feeds: Sequence[FeedRows], refusals: list[Refusal]) -> dict[str, _Job]:
        """Group the feeds by sequence. Counts their rows as canonical: the pass that follows computes them."""
        jobs: dict[str, _Job] = {}
        for feed in feeds:
            request_id = feed.ref.request_id
            try:
                sequence = self._accept(feed)
            except SeqMTPError as error:
                refusals.append(Refusal(ref=feed.ref, code=error.code, message=str(error)))
                jobs.pop(request_id, None)
                self._close(request_id)
                continue
            if feed.reset or request_id not in jobs:
                jobs[request_id] = _Job(sequence=sequence, first_base=feed.first_base)
            job = jobs[request_id]
            job.hidden.append(feed.hidden)
            job.next_ids.extend(feed.next_ids)
            job.is_asked = feed.depth > 0
            job.depth = min(feed.depth, self.config.max_depth, self._max_len - sequence.next_base)
        return jobs

    def _accept(self, feed: FeedRows) -> MtpSequence:
        """The feed's sequence, with room for its rows and drafts. Raises SeqMTPError, and then counts no row."""
        num_rows, size = len(feed.next_ids), self.model.hidden_size
        if num_rows == 0 or tuple(feed.hidden.shape) != (num_rows, size):
            raise ProtocolError(f"{num_rows} tokens need hidden rows [{num_rows}, {size}]")
        if not all(0 <= token < self.model.vocab_size for token in feed.next_ids):
            raise ProtocolError("a token is outside the vocabulary")
        if feed.first_base < 0 or feed.first_base + num_rows >= self._max_len + 1:
            raise ProtocolError(f"bases up to {feed.first_base + num_rows} do not fit a context of {self._max_len}")
        sequence = self._open(feed) if feed.reset else self._sequences.get(feed.ref.request_id)
        if sequence is None or feed.ref.epoch != sequence.ref.epoch or feed.ref.version < sequence.ref.version:
            raise StaleVersion(f"{feed.ref.request_id} is not open at epoch {feed.ref.epoch}; send a reset feed")
        if feed.first_base != sequence.next_base:
            raise StaleVersion(f"{feed.ref.request_id}: base {feed.first_base} given, {sequence.next_base} expected")
        next_base = sequence.next_base + num_rows
        num_slots = min(next_base + max(1, feed.depth), self._max_len + 1)
        self._cache.pool.grow(sequence.lease, num_slots)
        sequence.next_base, sequence.ref = next_base, feed.ref
        return sequence

    def _open(self, feed: FeedRows) -> MtpSequence:
        if feed.request is None:
            raise ProtocolError("a reset feed must carry its request")
        self._close(feed.ref.request_id)
        sequence = MtpSequence(
            ref=feed.ref,
            request=feed.request,
            lease=self._cache.pool.open(),
            first_base=feed.first_base,
            next_base=feed.first_base,
        )
        self._sequences[feed.ref.request_id] = sequence
        return sequence

    def _close(self, request_id: str) -> None:
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._cache.pool.close(sequence.lease)

    # ---- passes

    def _run_canonical(self, jobs: Sequence[_Job]) -> None:
        """Compute all fed rows; keep each sequence's last output row."""
        pieces: list[tuple[_Job, Tensor, list[int], int]] = []
        num_rows = 0
        for job in jobs:
            hidden, start = torch.cat(job.hidden), 0
            while start < len(job.next_ids):
                taken = min(PASS_ROWS - num_rows, len(job.next_ids) - start)
                pieces.append(
                    (job, hidden[start : start + taken], job.next_ids[start : start + taken], job.first_base + start)
                )
                start, num_rows = start + taken, num_rows + taken
                if num_rows == PASS_ROWS:
                    self._run(pieces, is_fed=True)
                    pieces, num_rows = [], 0
        if pieces:
            self._run(pieces, is_fed=True)

    def _run(self, pieces: Sequence[tuple[_Job, Tensor, Sequence[int], int]], *, is_fed: bool) -> None:
        """One pass over (job, hidden rows, next ids, first base) pieces."""
        pool = self._cache.pool
        spans = [
            Span(
                pages=pool.pages(job.sequence.lease),
                start=base + 1,
                num_rows=len(next_ids),
                first_slot=job.sequence.first_base + 1,
            )
            for job, _, next_ids, base in pieces
        ]
        hidden_Nd = torch.cat([hidden for _, hidden, _, _ in pieces])
        output_Nd = self._module.forward(
            self._module.fed(hidden_Nd) if is_fed else self._module.recycled(hidden_Nd),
            torch.tensor([token for _, _, next_ids, _ in pieces for token in next_ids]),
            torch.cat([torch.arange(base, base + len(next_ids)) for _, _, next_ids, base in pieces]),
            spans,
            self._cache.kv_LSE[0],
        )
        row = -1
        for job, _, next_ids, _ in pieces:
            row += len(next_ids)
            job.last_d = output_Nd[row]

    def _draft_one(self, jobs: list[_Job], by_id: dict[str, _Job], refusals: list[Refusal]) -> list[_Job]:
        """Draw one more token for each job. Returns the jobs that want another, their recurrent rows computed."""
        rows_Nd = torch.stack([job.last_d for job in jobs if job.last_d is not None])
        try:
            proposals = propose_tokens(
                self._module.draft_logits(rows_Nd),
                self._module.draft_token_ids,
                RowParams.of_requests([job.sequence.request for job in jobs]),
                [job.sequence.next_base + 1 + len(job.tokens) for job in jobs],
                self.config.draft_top_n,
            )
        except BadLogits as error:
            for row in error.rows:
                self._spoil(jobs[row].sequence, by_id, refusals)
            return [job for row, job in enumerate(jobs) if row not in error.rows]
        for job, token, pairs in zip(jobs, proposals.tokens, proposals.pairs, strict=True):
            job.tokens.append(token)
            job.pairs.append(pairs)
        again = [(job, rows_Nd[row : row + 1]) for row, job in enumerate(jobs) if len(job.tokens) < job.depth]
        if again:
            self._run(
                [(job, hidden, job.tokens[-1:], job.sequence.next_base + len(job.tokens) - 1) for job, hidden in again],
                is_fed=False,
            )
        return [job for job, _ in again]

    def _spoil(self, sequence: MtpSequence, by_id: dict[str, _Job], refusals: list[Refusal]) -> None:
        """Close a sequence whose rows are not finite, and clean its pages before others get them."""
        error = InternalError("the module's logits are not finite")
        refusals.append(Refusal(ref=sequence.ref, code=error.code, message=str(error)))
        del by_id[sequence.ref.request_id]
        self._cache.scrub(sequence.lease)
        self._close(sequence.ref.request_id)


def _probs(job: _Job) -> tuple[tuple[tuple[int, float], ...], ...]:
    """The job's draft distributions; empty unless its contract declares any."""
    return tuple(job.pairs) if any(job.pairs) else ()
