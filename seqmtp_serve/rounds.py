"""The round loop: plan, step, finish check, commit, publish. It knows ports and values only.

One task a cohort runs the loop, so that one cohort drafts and commits while another verifies. Nothing reaches a reader
before its commit was answered OK or DUP. A lost target costs its requests a replay, an unreachable store costs time;
an answer that the record went on without us ends the request here at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from random import random
from time import monotonic

from seqmtp_serve.committing import Committing
from seqmtp_serve.config import SchedulerConfig
from seqmtp_serve.congestion import Congestion
from seqmtp_serve.draft_depths import DraftDepths
from seqmtp_serve.driver_status import DriverStatus, levels
from seqmtp_serve.endings import Endings
from seqmtp_serve.errors import Draining, Fenced, InternalError, NotReady, Overloaded, SeqMTPError
from seqmtp_serve.fault_points import FaultPoint, Reached, unharmed
from seqmtp_serve.frontier.depth import DepthController
from seqmtp_serve.frontier.finish import FinishChecker
from seqmtp_serve.frontier.ledger import Ledger
from seqmtp_serve.frontier.round import State
from seqmtp_serve.frontier.round_notes import RoundNotes
from seqmtp_serve.frontier.scheduler import BatchScheduler
from seqmtp_serve.frontier.sequence import Sequence as LiveSequence
from seqmtp_serve.frontier.turnover import Turnover, bounded
from seqmtp_serve.live_requests import Decoder, LiveRequests
from seqmtp_serve.ports import CommitResult, FrontierStore, Snapshot, StepPlan, TargetGroup, TargetInfo
from seqmtp_serve.reconciling import Reconciling
from seqmtp_serve.request import CommittedRow, Ref, Request
from seqmtp_serve.settling import Settling
from seqmtp_serve.store_link import StoreLink
from seqmtp_serve.target_link import TargetLink
from seqmtp_serve.tasks import Background

_log = logging.getLogger(__name__)
_ABANDONED = NotReady("the request was abandoned before it began")
_DRAINS = "this coordinator is ending: another one goes on"


class OwnedElsewhere(Fenced):
    """The record is not ours to take: it is as in `snapshot`."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__(f"{snapshot.request.request_id} is owned by {snapshot.owner or 'nobody'}")
        self.snapshot = snapshot


class RoundDriver:
    """Drives every request submitted to it, on one target group and one store.

    Use it from one event loop: `start` once, then `submit`, `attach`, `cancel`, `status`, and `close`.
    `decoder_factory` gives a fresh decoder for a request: the next token in, the text it adds out. `reached` is told of
    each fault point; only tests give one.
    """

    def __init__(
        self,
        target: TargetGroup,
        store: FrontierStore,
        config: SchedulerConfig,
        decoder_factory: Callable[[Request], Decoder],
        *,
        owner: str = "local",
        clock: Callable[[], float] = monotonic,
        draw: Callable[[], float] = random,
        reached: Reached = unharmed,
    ) -> None:
        self.config = config
        self.ledger = Ledger(max(config.max_depth, config.max_copied))
        self.scheduler = BatchScheduler(config)
        self._clock = clock
        self._reached = reached
        self._target = TargetLink(target, config, self, clock)
        self._store = StoreLink(store, config, owner, clock)
        self._requests = LiveRequests(decoder_factory)
        self._endings = Endings(self.scheduler, self._requests, self.ledger, self._ended)
        self._reconciling = Reconciling(
            self.scheduler, self._requests, self._store, self._endings, self.ledger, self._wake
        )
        self._settling = Settling(self.scheduler, self._requests, self._endings, self.ledger)
        self._turnover = Turnover()
        self._committing = Committing(
            self.scheduler,
            self._requests,
            self._store,
            self._endings,
            self.ledger,
            self._turnover,
            refused=self._refused_by_record,
            clock=clock,
            reached=reached,
        )
        self.depth = DepthController(config.depth_policy, config.max_depth)
        self._depths = DraftDepths(self.depth, self.scheduler, self._target, self.ledger)
        self._retired = False
        self._congestion = Congestion(config, clock, draw)
        self._steps = count(1)
        self._work = [asyncio.Event() for _ in range(config.cohorts)]
        self._background = Background(self._task_died)

    # ---- for callers -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start looking for a target group, and the cohort loops. Returns at once: see `status().target_ready`."""
        self._background.spawn(self._target.keep())
        for cohort in range(self.config.cohorts):
            self._background.spawn(self._run_cohort(cohort))

    def retire(self) -> None:
        """Take nothing new from now on: `submit` raises Draining for what is not live here."""
        self._retired = True

    async def close(self) -> None:
        """Stop. Streams end with Draining; the records stay, for another coordinator to take over."""
        self.retire()
        await self._background.end()
        self._requests.end_all(Draining(_DRAINS))

    async def submit(
        self,
        request: Request,
        after_version: int = 0,
        *,
        meta: Mapping[str, str] | None = None,
        seen_epoch: int | None = None,
    ) -> AsyncIterator[CommittedRow]:
        """Start the request, join it if it is live here, or take its record over. Yields its rows above a version.

        Raises NotReady, Draining, Overloaded or a CallerError before there is a stream. The last row has `finish`. A
        stream that ends for a reason outside the record raises it: Fenced, StoreUnreachable, AncestryMismatch. If
        the id has a record already, the request and the `meta` in the record are those that count. With `seen_epoch`
        the record is taken over only at that epoch (0: only created); otherwise OwnedElsewhere, unless it has ended.
        """
        request_id = request.request_id
        if request_id in self._requests:
            return self._requests.read(request_id, after_version)
        if self._retired:
            raise Draining(_DRAINS)
        if self.scheduler.info is None or self._target.given_up:
            away_s = bounded(self._target.away_s)
            raise NotReady(f"no target group is ready: {self._target.error}", retry_after_s=away_s)
        try:
            self.scheduler.accepts(request, len(self._requests))
        except Overloaded as error:
            raise Overloaded(str(error), retry_after_s=self._turnover.refused(self._clock())) from None
        FinishChecker(request)  # refuses what could not be decided later
        self._requests.open(request_id)
        rows = self._requests.read(request_id, after_version)
        try:
            snapshot = await self._store.acquire(request, meta, seen_epoch=seen_epoch)
            if not snapshot.acquired and snapshot.finish is None:
                raise OwnedElsewhere(snapshot)
            sequence = self._requests.take_up(snapshot)
        except BaseException as error:
            self._requests.end(request_id, error if isinstance(error, SeqMTPError) else _ABANDONED)
            raise
        if sequence is not None:
            self.scheduler.add(sequence)
            self._wake()
        return rows

    def attach(self, request_id: str, after_version: int = 0) -> AsyncIterator[CommittedRow]:
        """Rows of a request that is live here. RequestNotFound: it is not; the store may know it."""
        return self._requests.read(request_id, after_version)

    async def cancel(self, request_id: str, *, abandoned: bool = False) -> bool:
        """End the record, then the request here: its readers get a last row that says `cancelled`.

        True when the record is cancelled, by this call or before. False when there is none or it ended otherwise; and,
        if it is only `abandoned` (nobody reads it here), when another process reads it or another coordinator owns it.
        A row that is being committed meanwhile is either in the record, and then readers get it first, or refused.
        Raises NotReady when the store does not answer.
        """
        owned = self._requests.get(request_id)
        if abandoned and owned is None:
            return False
        epoch = owned.frontier.epoch if abandoned and owned is not None else None
        answer = await self._store.cancel(request_id, abandoned_at=epoch)
        cancelled = answer in (CommitResult.OK, CommitResult.DUP)
        sequence = self._requests.get(request_id)
        if sequence is not None and cancelled:
            if sequence.state is State.COMMITTING:
                self._committing.cancel_after(request_id)
            else:
                self._endings.cancelled(sequence)
        return cancelled

    def owned(self) -> tuple[Ref, ...]:
        """The requests whose records this driver owns, and where they are: their leases want renewal."""
        return self._requests.owned()

    def is_live(self, request_id: str) -> bool:
        """Whether the request is being generated here, or about to be."""
        return request_id in self._requests

    def meta(self, request_id: str) -> Mapping[str, str]:
        """What is kept with the record of a request that is live here; empty for any other."""
        return self._requests.meta(request_id)

    @property
    def notes(self) -> RoundNotes:
        """What rounds made here say beyond their rows; of requests that ended here, until somebody kept it."""
        return self._requests.notes

    def renewed(self, refs: Sequence[Ref], answers: Sequence[CommitResult]) -> None:
        """The record's answers to a renewal of leases: who no longer owns stops now, not at its next commit."""
        for ref, answer in zip(refs, answers, strict=True):
            sequence = self._requests.get(ref.request_id)
            if answer is CommitResult.OK or sequence is None or sequence.frontier.epoch != ref.epoch:
                continue
            if sequence.state not in (State.COMMITTING, State.FINISHED):  # a commit under way gets the same answer
                self._refused_by_record(sequence)

    def status(self) -> DriverStatus:
        """Readiness, load and counters, now."""
        counters = self.ledger.counters()
        counters["preemptions"] = float(self.scheduler.num_preempted)
        counters["store_retries"] = float(self._store.num_retries)
        return DriverStatus(
            target_ready=not self._target.detail,
            target_detail=self._target.detail,
            proposer_ready=self._target.error is None and self._target.proposer_ready,
            store_ready=self._store.error is None,
            store_detail=self._store.error or "",
            info=self.scheduler.info,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            max_waiting=self.config.max_waiting,
            depth_reason=self._depths.reason,
            counters=counters,
            draining=self._retired,
            gauges=levels(self.scheduler, self._target.free_pages, len(self._requests)),
        )

    def check(self) -> None:
        """Assert what must hold between two rounds: what is not live here is nowhere here. Asked whenever one rests."""
        if not self._requests:
            assert not self.scheduler.running
            assert not self.scheduler.waiting
            assert not self.owned()
            self.scheduler.check()

    # ---- the loop ----------------------------------------------------------------------------------------------

    async def _run_cohort(self, cohort: int) -> None:
        while True:
            await self._target.ready.wait()
            try:
                await self._round(cohort)
            except Exception as error:  # ours: these requests end, the process goes on
                _log.exception("cohort %d", cohort)
                for sequence in [one for one in self.scheduler.running if one.cohort == cohort]:
                    self._endings.with_error(sequence, InternalError(f"{type(error).__name__}: {error}"))
                await asyncio.sleep(self.config.retry_first_s)

    async def _round(self, cohort: int) -> None:
        """One round of every ready sequence of the cohort; a rest when there is nothing to do."""
        began = self._clock()
        pause_s = self._congestion.pause_s  # asked once: it must not end between a plan that kept to it and the rest
        plan = self._plan(cohort, admit=not pause_s)
        if plan is None:
            await self._rest(cohort, pause_s)
            return
        behind = sum(one.asked_behind for one in self.scheduler.in_step(plan.step_id))
        self._reached(FaultPoint.BEFORE_PREPARE)
        answer = await self._target.step(plan)
        if answer is not None:
            self._reached(FaultPoint.AFTER_VERIFY)
            report, step_ms = answer.report, answer.step_ms
            self.ledger.count("drafts.refused", report.refused_drafts)
            self._congestion.observe(any(row.error == Overloaded.code for row in report.rows))
            chosen = self._settling.settle(plan, report, step_ms)
            commit_ms = await self._committing.commit(chosen)
            costs = self.ledger.record_step(plan, report, step_ms, commit_ms)
            if costs is not None:
                self.ledger.record_overlap(report.costs, 1e3 * (self._clock() - began), answer.wall_ms)
            self.depth.observe(plan, report, costs, behind=behind)
            self._wake()

    async def _rest(self, cohort: int, pause_s: float) -> None:
        """Until there is something to do: news, or the end of a pause in admission that somebody waits for."""
        self.check()
        if not self.scheduler.running:
            self._target.rest()
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s if pause_s and self.scheduler.waiting else None):
                await self._work[cohort].wait()

    def _plan(self, cohort: int, *, admit: bool) -> StepPlan | None:
        self._work[cohort].clear()
        return self.scheduler.plan(
            cohort,
            next(self._steps),
            self._depths.choose,
            drafts=self._target.proposer_ready,
            admit=admit and not self._target.draining,
        )

    def _refused_by_record(self, sequence: LiveSequence) -> None:
        self._reconciling.let_go(sequence)
        self._background.spawn(self._reconciling.reconcile(sequence))

    # ---- what the target link says -----------------------------------------------------------------------------

    def target_found(self, info: TargetInfo) -> None:
        """Serve on this group from now on. What can no longer fit on it ends."""
        self.scheduler.info = info
        self._endings.unfit()
        self._wake()

    def target_lost(self) -> None:
        """All KV is gone: replay everything, once there is a group again."""
        self.ledger.count("target_losses")
        self.ledger.count("replays", self.scheduler.lose_target())

    def target_given_up(self, error: NotReady) -> None:
        """Readers have waited long enough; the records stay."""
        self._endings.everyone(error)

    def _ended(self) -> None:
        self._turnover.ended(self._clock())
        self._wake()

    # ---- tasks -------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        for event in self._work:
            event.set()

    def _task_died(self, error: BaseException) -> None:
        _log.error("a driver task died", exc_info=error)
        self._requests.end_all(InternalError(f"a driver task died: {error}"))
