"""The proposer engine: the MTP modules over their own pages, for the sequences of one or many targets.

Rows fed by a target are canonical: the module of depth 1 computes each once from true target features, and the module
of depth k each once from true tokens and the canonical row of depth k-1. They run depth after depth. The row of depth k
at base i needs the token at i+k, so the last k-1 fed bases have no canonical row of depth k yet, and one row of each
depth is carried to the next feed.

Drafts beyond the first come from provisional rows above the canonical ones, which are never counted and are overwritten
by the next feed, whether their tokens were accepted or not. Which module makes them is the declared rollout:

    "chain"      draft s+1 from the module of depth s+1, on the row of draft s; at most as many drafts as modules
    "recurrent"  the same, and on: step s runs the module of depth s mod D + 1 on the row of step s-1, whatever s

Slot rule: the cached row of base i and depth k lies at slot i + k, the position of the newest token it consumed, so a
slot depends on the same tokens as the target's slot of that number. Slots below `first_base + k` are never read. RoPE
position is i. A recurrent step past the last module takes the slot after its module's newest row.

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
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.family import ModelConfig, numerics_for
from seqmtp_serve.model.mtp import DepthPool, MtpModule, build_modules
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
    """One sequence: canonical rows of depth k of bases `first_base .. next_base - k`.

    `carried[k - 1]` is the last canonical row of depth k, which the module of depth k + 1 has not consumed yet.
    """

    ref: Ref
    request: Request
    lease: Lease
    first_base: int
    next_base: int
    carried: list[Tensor | None]  # each [d]


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
    last_nd: Tensor = field(default_factory=lambda: torch.empty(0))  # outputs of the newest step: one row, or several


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Consecutive rows of one sequence for one module: row j is base `base + j` at slot `slot + j`."""

    sequence: MtpSequence
    base: int
    slot: int
    hidden: Tensor  # [n, d], as the module consumes it
    next_ids: Sequence[int]

    def cut(self, start: int, stop: int) -> _Rows:
        return _Rows(
            sequence=self.sequence,
            base=self.base + start,
            slot=self.slot + start,
            hidden=self.hidden[start:stop],
            next_ids=self.next_ids[start:stop],
        )


class ProposerEngine:
    """Synchronous, single-threaded, and without IO."""

    def __init__(self, config: EngineConfig, model: ModelConfig, mtp: MtpConfig, tensors: Mapping[str, Tensor]) -> None:
        torch.set_num_threads(config.num_threads)
        self.config, self.model = config, model
        self._max_len = min(config.max_model_len, model.max_position)
        numerics = numerics_for(config, model)
        self._modules = build_modules(tensors, model, mtp, config.page_size, self._max_len, numerics)
        self._max_depth = min(config.max_depth, mtp.num_modules) if mtp.rollout == "chain" else config.max_depth
        self._cache = PagedCache(Owner.MTP, config, model, mtp.num_modules)
        self._sequences: dict[str, MtpSequence] = {}

    @property
    def modules(self) -> tuple[MtpModule, ...]:
        """The weights, for accounting."""
        return self._modules

    @property
    def cache(self) -> PagedCache:
        """The pages, for accounting."""
        return self._cache

    @torch.inference_mode()
    def propose(self, feeds: Sequence[FeedRows], closed: Sequence[str] = ()) -> list[Draft | Refusal]:
        """Forget `closed`, take the feeds in order, and draft for each sequence as its newest feed wishes.

        One canonical pass of each module over all fed rows (several of `PASS_ROWS` if there are many), then one pass
        for each further draft. A feed that does not follow its sequence is answered with a Refusal; the others go on.
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
            job.depth = min(feed.depth, self._max_depth, self._max_len - sequence.next_base)
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
            carried=[None] * (len(self._modules) - 1),
        )
        self._sequences[feed.ref.request_id] = sequence
        return sequence

    def _close(self, request_id: str) -> None:
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._cache.pool.close(sequence.lease)

    # ---- passes

    def _run_canonical(self, jobs: Sequence[_Job]) -> None:
        """Compute all fed rows, depth after depth; keep each sequence's last row of depth 1."""
        first, rows = self._modules[0], list[_Rows]()
        for job in jobs:
            slot, hidden = job.first_base + first.depth, first.fed(torch.cat(job.hidden))
            rows.append(
                _Rows(sequence=job.sequence, base=job.first_base, slot=slot, hidden=hidden, next_ids=job.next_ids)
            )
        for module in self._modules:
            outputs = self._run_split(module, rows)
            if module is first:
                for job, output_nd in zip(jobs, outputs, strict=True):
                    job.last_nd = output_nd[-1:]
            if module.depth < len(self._modules):
                rows = [_of_next_depth(module, each, output) for each, output in zip(rows, outputs, strict=True)]

    def _run_split(self, module: MtpModule, rows: Sequence[_Rows]) -> list[Tensor]:
        """Outputs `[n, d]` for each of `rows`, computed in passes of at most `PASS_ROWS`."""
        cuts: list[tuple[int, _Rows]] = []  # (index into rows, part of it)
        outputs: list[list[Tensor]] = [[] for _ in rows]
        num_rows = 0

        def run() -> None:
            parts = self._run(module, [part for _, part in cuts])
            for (index, _), part in zip(cuts, parts, strict=True):
                outputs[index].append(part)

        for index, each in enumerate(rows):
            start = 0
            while start < len(each.next_ids):
                taken = min(PASS_ROWS - num_rows, len(each.next_ids) - start)
                cuts.append((index, each.cut(start, start + taken)))
                start, num_rows = start + taken, num_rows + taken
                if num_rows == PASS_ROWS:
                    run()
                    cuts, num_rows = [], 0
        if cuts:
            run()
        return [torch.cat(parts) if parts else each.hidden for parts, each in zip(outputs, rows, strict=True)]

    def _run(self, module: MtpModule, rows: Sequence[_Rows]) -> list[Tensor]:
        """One pass."""
        pool = self._cache.pool
        spans = [
            Span(
                pages=pool.pages(each.sequence.lease),
                start=each.slot,
                num_rows=len(each.next_ids),
                first_slot=each.sequence.first_base + module.depth,
            )
            for each in rows
        ]
        output_Nd = module.forward(
            torch.cat([each.hidden for each in rows]),
            torch.tensor([token for each in rows for token in each.next_ids]),
            torch.cat([torch.arange(each.base, each.base + len(each.next_ids)) for each in rows]),
            spans,
            DepthPool(depth=module.depth, rows_SE=self._cache.kv_LSE[module.depth - 1]),
        )
        return list(torch.split(output_Nd, [len(each.next_ids) for each in rows]))

    def _draft_one(self, jobs: list[_Job], by_id: dict[str, _Job], refusals: list[Refusal]) -> list[_Job]:
        """Draw one more token for each job, all equally far. Returns those that want another, their rows computed."""
        step, num_modules = len(jobs[0].tokens), len(self._modules)
        module = self._modules[step % num_modules]
        rows_Nd = torch.stack([job.last_nd[-1] for job in jobs])
        try:
            proposals = propose_tokens(
                module.draft_logits(rows_Nd),
                module.draft_token_ids,
                RowParams.of_requests([job.sequence.request for job in jobs]),
                [job.sequence.next_base + 1 + step for job in jobs],
                self.config.draft_top_n,
            )
        except BadLogits as error:
            for row in error.rows:
                self._spoil(jobs[row].sequence, by_id, refusals)
            return [job for row, job in enumerate(jobs) if row not in error.rows]
        for job, token, pairs in zip(jobs, proposals.tokens, proposals.pairs, strict=True):
            job.tokens.append(token)
            job.pairs.append(pairs)
        again = [job for job in jobs if len(job.tokens) < job.depth]
        if again:
            following = self._modules[(step + 1) % num_modules]
            rows = [self._provisional_rows(job, module, following) for job in again]
            for job, output_nd in zip(again, self._run(following, rows), strict=True):
                job.last_nd = output_nd
        return again

    def _provisional_rows(self, job: _Job, module: MtpModule, following: MtpModule) -> _Rows:
        """What `following` computes after `module` turned the job's newest rows into `last_nd` and a token was drawn.

        In the first lap that is every row of its depth that a draft closes: as many as there are drafts, the first of
        which reads the canonical row that `module` computed last. Later it is the one row of the newest draft.
        """
        sequence, step = job.sequence, len(job.tokens)
        lap, known_nd = step // len(self._modules), job.last_nd
        if lap:
            base, slot = sequence.next_base - 1 + lap * len(self._modules), sequence.next_base + lap
            return _Rows(
                sequence=sequence,
                base=base,
                slot=slot + following.depth - 1,
                hidden=module.recycled(known_nd[-1:]),
                next_ids=job.tokens[-1:],
            )
        carried_d = sequence.carried[module.depth - 1]
        if step > 1 and carried_d is not None:
            known_nd = torch.cat((carried_d[None], known_nd))
        base = sequence.next_base - len(known_nd)
        return _Rows(
            sequence=sequence,
            base=base,
            slot=base + following.depth,
            hidden=module.recycled(known_nd),
            next_ids=job.tokens[-len(known_nd) :],
        )

    def _spoil(self, sequence: MtpSequence, by_id: dict[str, _Job], refusals: list[Refusal]) -> None:
        """Close a sequence whose rows are not finite, and clean its pages before others get them."""
        error = InternalError("the module's logits are not finite")
        refusals.append(Refusal(ref=sequence.ref, code=error.code, message=str(error)))
        del by_id[sequence.ref.request_id]
        self._cache.scrub(sequence.lease)
        self._close(sequence.ref.request_id)


def _of_next_depth(module: MtpModule, rows: _Rows, output_nd: Tensor) -> _Rows:
    """What the module of the next depth computes after `module` turned `rows` into `output_nd`.

    The tokens are the same, so the bases are one lower: the row carried from the last feed comes first, and the newest
    row waits for its token. A sequence that has no carried row yet begins one token later.
    """
    sequence, depth = rows.sequence, module.depth
    carried_d, next_ids, base = sequence.carried[depth - 1], rows.next_ids, rows.base - 1
    if carried_d is None:
        next_ids, base = next_ids[1:], rows.base
        known_nd = output_nd
    else:
        known_nd = torch.cat((carried_d[None], output_nd))
    if len(known_nd):
        sequence.carried[depth - 1] = known_nd[-1].clone()
    hidden_nd = module.recycled(known_nd[:-1])
    return _Rows(sequence=sequence, base=base, slot=base + depth + 1, hidden=hidden_nd, next_ids=next_ids)


def _probs(job: _Job) -> tuple[tuple[tuple[int, float], ...], ...]:
    """The job's draft distributions; empty unless its contract declares any."""
    return tuple(job.pairs) if any(job.pairs) else ()
