"""The proposer engine: which rows a target has fed for which sequence, and the drafts made from them.

Fed rows are canonical, and each is computed once. Drafting past the first token computes provisional rows above them,
which are never counted and are overwritten by the next feed, whether their tokens were accepted or not. How the modules
compute both is in `depths.py`.

Shapes: N rows of a pass, d hidden.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from seqmtp_serve.config import EngineConfig
from seqmtp_serve.engine.caches import PagedCache
from seqmtp_serve.engine.depths import Depths, MtpSequence
from seqmtp_serve.engine.hidden_rows import unpack
from seqmtp_serve.engine.memory import storages
from seqmtp_serve.engine.pages import Owner
from seqmtp_serve.errors import InternalError, ProtocolError, SeqMTPError, StaleVersion
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.family import ModelConfig, kernel_levels, numerics_for
from seqmtp_serve.model.mtp import MtpModule, build_modules
from seqmtp_serve.ports import Draft, FeedRows
from seqmtp_serve.request import Ref
from seqmtp_serve.speculation.distributions import BadLogits
from seqmtp_serve.speculation.draft import propose_tokens
from seqmtp_serve.speculation.draft_chances import DraftChances, confidences
from seqmtp_serve.speculation.row_params import RecentRowParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A feed that was not taken, and why. The sequence is closed: it must be opened anew with a reset feed."""

    ref: Ref
    code: str
    message: str


@dataclass(slots=True, kw_only=True)
class _Job:
    """What one call of `propose` does for one sequence."""

    sequence: MtpSequence
    first_base: int
    hidden: list[Tensor] = field(default_factory=list)  # each [n, d]
    next_ids: list[int] = field(default_factory=list)
    is_asked: bool = False  # drafts were asked for, even if the context has no room for any
    depth: int = 0
    floor: float = 0.0
    tokens: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)  # if there is a floor; so with the next
    chances: list[float] = field(default_factory=list)
    pairs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    last_nd: Tensor = field(default_factory=lambda: torch.empty(0))  # outputs of the newest step: one row, or several


class ProposerEngine:
    """Synchronous, single-threaded, and without IO."""

    def __init__(self, config: EngineConfig, model: ModelConfig, mtp: MtpConfig, tensors: Mapping[str, Tensor]) -> None:
        torch.set_num_threads(config.num_threads)
        self.config, self.model = config, model
        self._max_len = min(config.max_model_len, model.max_position)
        numerics = numerics_for(config, model)
        self._device = numerics.device
        self._modules = build_modules(tensors, model, mtp, config.page_size, self._max_len, numerics)
        self._weight_bytes = sum(storages(self._modules).values())
        self._max_depth = min(config.max_depth, mtp.num_modules) if mtp.rollout == "chain" else config.max_depth
        self._cache = PagedCache(Owner.MTP, config, model, mtp.num_modules, self._device)
        self._depths = Depths(self._modules, self._cache)
        self._sequences: dict[str, MtpSequence] = {}
        self._row_params = RecentRowParams(self._device)
        self._chances = DraftChances()

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._device

    @property
    def modules(self) -> tuple[MtpModule, ...]:
        """The weights, for accounting."""
        return self._modules

    @property
    def kernels(self) -> Mapping[str, str]:
        """Which backend computes what, as `Trunk.kernels`."""
        return self._modules[0].kernels

    @property
    def cache(self) -> PagedCache:
        """The pages, for accounting."""
        return self._cache

    @torch.inference_mode()
    def propose(self, feeds: Sequence[FeedRows], closed: Sequence[str] = ()) -> list[Draft | Refusal]:
        """Forget `closed`, take the feeds in order, and draft for each sequence as its newest feed wishes.

        One canonical pass of each module over all fed rows (several of `PASS_ROWS` if there are many), then one pass
        for each further draft. A feed that does not follow its sequence is answered with a Refusal; the others go on.
        The time of the whole call is split evenly over its drafts' `mtp_ms`, the experts it read over `mtp_touched`.
        """
        started, touched_before = time.perf_counter(), self._num_touched
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
        touched = (self._num_touched - touched_before) / max(1, num_drafts)
        drafts = [
            Draft(
                ref=job.sequence.ref,
                tokens=tuple(job.tokens),
                draft_probs=_probs(job),
                chances=tuple(job.chances),
                mtp_ms=share_ms,
                mtp_touched=touched,
            )
            for job in jobs.values()
            if job.is_asked
        ]
        return [*drafts, *refusals]

    @property
    def _num_touched(self) -> int:
        """Experts that the modules' layer passes have read so far."""
        return sum(module.tally.settle().num_touched for module in self._modules if module.tally is not None)

    @property
    def num_sequences(self) -> int:
        """Sequences that are open."""
        return len(self._sequences)

    @property
    def num_held_pages(self) -> int:
        """Pages they hold."""
        return self._cache.pool.num_pages - self._cache.pool.num_free

    def levels(self) -> dict[str, float]:
        """What is held now, for telemetry; from the thread that proposes."""
        return {
            "sequences": float(self.num_sequences),
            "pages_held": float(self.num_held_pages),
            "mtp_kv_bytes": float(self._cache.num_rows_in_use * self._cache.row_bytes),
            "weight_bytes": float(self._weight_bytes),
            **kernel_levels(self.kernels),
        }

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
                scales_n = None if feed.hidden_scales is None else feed.hidden_scales.to(self._device)
                hidden_nd = unpack(feed.hidden.to(self._device), scales_n)
                sequence = self._accept(feed)
            except SeqMTPError as error:
                refusals.append(Refusal(ref=feed.ref, code=error.code, message=str(error)))
                jobs.pop(request_id, None)
                self._close(request_id)
                continue
            if feed.reset or request_id not in jobs:
                jobs[request_id] = _Job(sequence=sequence, first_base=feed.first_base)
            job = jobs[request_id]
            job.hidden.append(hidden_nd)
            job.next_ids.extend(feed.next_ids)
            job.is_asked = feed.depth > 0
            job.depth = min(feed.depth, self._max_depth, self._max_len - sequence.next_base)
            job.floor = feed.floor
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
        tokens, confidences = sequence.drawn
        self._chances.learn(sequence.request.params, tokens, confidences, feed.next_ids)
        sequence.drawn = (), ()
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
            self._cache.close(sequence.lease)

    # ---- drafting

    def _run_canonical(self, jobs: Sequence[_Job]) -> None:
        """Compute all fed rows; keep each sequence's last one of depth 1."""
        fed = [self._depths.fed_rows(job.sequence, job.first_base, torch.cat(job.hidden), job.next_ids) for job in jobs]
        for job, newest_1d in zip(jobs, self._depths.compute_canonical(fed), strict=True):
            job.last_nd = newest_1d

    def _draft_one(self, jobs: list[_Job], by_id: dict[str, _Job], refusals: list[Refusal]) -> list[_Job]:
        """Draw one more token for each job, all equally far. Returns those that want another, their rows computed."""
        step = len(jobs[0].tokens)
        module = self._depths.module_of_step(step)
        logits_NV = module.draft_logits(torch.stack([job.last_nd[-1] for job in jobs]))
        try:
            proposals = propose_tokens(
                logits_NV,
                module.draft_token_ids,
                self._row_params.of([job.sequence.request for job in jobs]),
                [job.sequence.next_base + 1 + step for job in jobs],
                self.config.draft_top_n,
                [job.sequence.request.params.shaping for job in jobs],
            )
        except BadLogits as error:
            for row in error.rows:
                self._spoil(jobs[row].sequence, by_id, refusals)
            return [job for row, job in enumerate(jobs) if row not in error.rows]
        for job, token, pairs in zip(jobs, proposals.tokens, proposals.pairs, strict=True):
            job.tokens.append(token)
            job.pairs.append(pairs)
        if any(job.floor for job in jobs):
            self._judge(jobs, confidences(logits_NV))
        again = [job for job in jobs if len(job.tokens) < job.depth and not (job.floor and job.chances[-1] < job.floor)]
        if again:
            rows = [self._depths.provisional_rows(job.sequence, job.tokens, job.last_nd) for job in again]
            outputs = self._depths.compute(self._depths.module_of_step(step + 1), rows)
            for job, output_nd in zip(again, outputs, strict=True):
                job.last_nd = output_nd
        return again

    def _judge(self, jobs: Sequence[_Job], shares: Sequence[float]) -> None:
        """Say how likely the newest drafts are to be accepted, where that is asked."""
        for job, share in zip(jobs, shares, strict=True):
            if job.floor:
                chance = self._chances.of(job.sequence.request.params, share)
                job.chances.append(round(chance * (job.chances[-1] if job.chances else 1.0), 4))
                job.confidences.append(share)
                job.sequence.drawn = job.tokens, job.confidences

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
