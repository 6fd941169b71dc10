"""The round loop: plan, step, finish check, commit, publish. It knows ports and values only.

One task a cohort runs the loop, so that one cohort drafts and commits while another verifies. Nothing reaches a reader
before its commit was answered OK or DUP. A lost target costs its requests a replay, an unreachable store costs time;
an answer that the record went on without us ends the request here at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from random import random
from time import monotonic
from typing import NamedTuple

from seqmtp_serve.config import SchedulerConfig
from seqmtp_serve.congestion import Congestion
from seqmtp_serve.driver_status import DriverStatus
from seqmtp_serve.errors import (
    AncestryMismatch,
    ContextOverflow,
    Fenced,
    InternalError,
    NotReady,
    Overloaded,
    ProtocolError,
    RequestNotFound,
    SeqMTPError,
    StaleVersion,
    StoreBehind,
    StoreUnreachable,
)
from seqmtp_serve.frontier.ancestry import extend_digest
from seqmtp_serve.frontier.depth import DepthChoice, DepthPolicy
from seqmtp_serve.frontier.finish import FinishChecker
from seqmtp_serve.frontier.ledger import Ledger, RoundCosts
from seqmtp_serve.frontier.refusal import Remedy, remedy
from seqmtp_serve.frontier.round import State
from seqmtp_serve.frontier.scheduler import BatchScheduler
from seqmtp_serve.frontier.sequence import Sequence
from seqmtp_serve.live_requests import Decoder, LiveRequests
from seqmtp_serve.ports import (
    Commit,
    CommitResult,
    FrontierStore,
    RowResult,
    StepPlan,
    StepReport,
    TargetGroup,
    TargetInfo,
)
from seqmtp_serve.request import CommittedRow, FinishReason, Request
from seqmtp_serve.store_link import StoreLink
from seqmtp_serve.target_link import TargetLink

_log = logging.getLogger(__name__)
_ABANDONED = NotReady("the request was abandoned before it began")


class Chosen(NamedTuple):
    """A row that was chosen and is not yet committed: nobody may see it."""

    sequence: Sequence
    row: CommittedRow
    result: RowResult


class RoundDriver:
    """Drives every request submitted to it, on one target group and one store.

    Use it from one event loop: `start` once, then `submit`, `attach`, `cancel`, `status`, and `close`.
    `decoder_factory` gives a fresh decoder for a request: the next token in, the text it adds out.
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
    ) -> None:
        self.config = config
        self.ledger = Ledger()
        self.scheduler: BatchScheduler | None = None  # none before the first target group
        self._clock = clock
        self._target = TargetLink(target, config, self, clock)
        self._store = StoreLink(store, config, owner, clock)
        self._requests = LiveRequests(decoder_factory)
        self._cancelled: set[str] = set()  # while their row is being committed
        self._policy = DepthPolicy(config.depth_policy, config.max_depth)
        self._choice = DepthChoice(depth=0, reason="no step yet")
        self._proposer_ready = True
        self._congestion = Congestion(config, clock, draw)
        self._steps = count(1)
        self._work = [asyncio.Event() for _ in range(config.cohorts)]
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- for callers -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start looking for a target group, and the cohort loops. Returns at once: see `status().target_ready`."""
        self._spawn(self._target.keep())
        for cohort in range(self.config.cohorts):
            self._spawn(self._run_cohort(cohort))

    async def close(self) -> None:
        """Stop. Streams end with NotReady; the records stay, for another coordinator to take over."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._requests.end_all(NotReady("this coordinator is stopping"))

    async def submit(self, request: Request, after_version: int = 0) -> AsyncIterator[CommittedRow]:
        """Start the request, join it if it is live here, or take its record over. Yields its rows above a version.

        Raises NotReady, Overloaded or a CallerError before there is a stream. The last row carries `finish`. A stream
        that ends for a reason outside the record raises it: Fenced, StoreUnreachable, StoreBehind, NotReady,
        RequestNotFound. If the id has a record already, the request in the record is the one that runs.
        """
        request_id = request.request_id
        if request_id in self._requests:
            return self._requests.read(request_id, after_version)
        if self.scheduler is None or self._target.given_up:
            raise NotReady(f"no target group is ready: {self._target.error}")
        self.scheduler.accepts(request, len(self._requests))
        FinishChecker(request)  # refuses what could not be decided later
        self._requests.open(request_id)
        rows = self._requests.read(request_id, after_version)
        try:
            sequence = self._requests.take_up(await self._store.acquire(request))
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

    async def cancel(self, request_id: str) -> bool:
        """End the record, then the request here: its readers get a last row that says `cancelled`.

        False when no such record was running. A row that is being committed meanwhile is either in the record, and
        then readers get it first, or refused. Raises NotReady when the store does not answer.
        """
        answer = await self._store.cancel(request_id)
        sequence = self._requests.get(request_id)
        if sequence is not None and answer is CommitResult.OK:
            if sequence.state is State.COMMITTING:
                self._cancelled.add(request_id)
            else:
                self._end_cancelled(sequence)
        return answer is CommitResult.OK

    def status(self) -> DriverStatus:
        """Readiness, load and counters, now."""
        scheduler, counters = self.scheduler, self.ledger.counters()
        counters["preemptions"] = float(scheduler.num_preempted if scheduler else 0)
        counters["store_retries"] = float(self._store.num_retries)
        return DriverStatus(
            target_ready=self._target.error is None,
            target_detail=self._target.error or "",
            proposer_ready=self._target.error is None and self._proposer_ready,
            store_ready=self._store.error is None,
            store_detail=self._store.error or "",
            info=scheduler.info if scheduler else None,
            running=len(scheduler.running) if scheduler else 0,
            waiting=len(scheduler.waiting) if scheduler else 0,
            max_waiting=self.config.max_waiting,
            depth_reason=self._choice.reason,
            counters=counters,
        )

    # ---- the loop ----------------------------------------------------------------------------------------------

    async def _run_cohort(self, cohort: int) -> None:
        while True:
            await self._target.ready.wait()
            try:
                if not await self._round(cohort):
                    await self._rest(cohort)
            except Exception as error:  # ours: these requests end, the process goes on
                _log.exception("cohort %d", cohort)
                self._fail_cohort(cohort, InternalError(f"{type(error).__name__}: {error}"))
                await asyncio.sleep(self.config.retry_first_s)

    async def _round(self, cohort: int) -> bool:
        """One round of every ready sequence of the cohort. False when there was nothing to do."""
        plan = self._plan(cohort)
        if plan is None:
            return False
        answer = await self._target.step(plan)
        if answer is not None:
            report, step_ms = answer
            chosen = self._settle(plan, report, step_ms)
            commit_ms = await self._commit(chosen)
            self._account(plan, report, step_ms, commit_ms)
            self._wake()
        return True

    async def _rest(self, cohort: int) -> None:
        """Until there is something to do: news, or the end of a pause in admission."""
        assert self.scheduler is not None
        pause_s = self._congestion.pause_s if self.scheduler.waiting else 0.0
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s or None):
                await self._work[cohort].wait()

    def _plan(self, cohort: int) -> StepPlan | None:
        assert self.scheduler is not None
        self._work[cohort].clear()
        depths = self.scheduler.ready_depths(cohort)
        if depths:
            ready = self._proposer_ready
            self._choice = self._policy.choose(self.ledger, len(depths), max(depths), proposer_ready=ready)
            self.ledger.count("fallbacks", int(self._choice.fallback))
        return self.scheduler.plan(cohort, next(self._steps), self._choice.depth, admit=not self._congestion.pause_s)

    def _settle(self, plan: StepPlan, report: StepReport, step_ms: float) -> list[Chosen]:
        """Pass each result through its sequence and its finish checker: the rows to commit."""
        assert self.scheduler is not None
        self._proposer_ready = report.proposer_ready
        self._congestion.observe(any(row.error == Overloaded.code for row in report.rows))
        chosen = [self._settle_one(plan.step_id, result) for result in report.rows]
        for sequence in self.scheduler.in_step(plan.step_id):  # the target said nothing fitting about these
            silence = RowResult(ref=sequence.frontier.ref, error=StaleVersion.code, message="no answer")
            chosen.append(self._settle_one(plan.step_id, silence))
        timings = {"step": step_ms, "forward": report.costs.forward, "draft_wait": report.costs.draft_wait}
        timings |= {"select": report.costs.select, "pack": report.costs.pack, "mtp": report.costs.mtp}
        return [one._replace(row=replace(one.row, timings_ms=dict(timings))) for one in chosen if one is not None]

    def _settle_one(self, step_id: int, result: RowResult) -> Chosen | None:
        sequence = self._requests.get(result.ref.request_id)
        if sequence is None:
            self.ledger.count("late_results")
            return None
        try:
            row = sequence.settle(step_id, result) if result.error is None else self._refused(sequence, step_id, result)
        except (StaleVersion, AncestryMismatch):
            self.ledger.count("late_results")
            return None
        except Exception as error:  # the target's or the decoder's; no other request pays for it
            _log.exception("%s: its result cannot be used", result.ref.request_id)
            row = sequence.fail(error.code if isinstance(error, ProtocolError) else InternalError.code)
        return None if row is None else Chosen(sequence, row, result)

    def _refused(self, sequence: Sequence, step_id: int, result: RowResult) -> CommittedRow | None:
        """What the target would not do: replay it, wait, let go, or end it in the record."""
        assert self.scheduler is not None
        sequence.check_refusal(step_id, result)
        code = result.error or ""
        _log.info("%s refused at version %d: %s", result.ref.request_id, result.ref.version, result)
        self.ledger.count(f"refused.{code}")
        match remedy(code, sequence.refusals):
            case Remedy.REPLAY:
                self.ledger.count("replays")
                sequence.refusals += 1
                self.scheduler.replay(sequence)
            case Remedy.WAIT:
                self.scheduler.replay(sequence)
            case Remedy.LET_GO:
                self._end(sequence, Fenced(result.message or "a newer epoch owns the request"))
            case Remedy.FAIL:
                return sequence.fail(code)
        return None

    async def _commit(self, chosen: list[Chosen]) -> float:
        """Commit all rows of a step at once, then show those that are in the record. Returns milliseconds."""
        started = self._clock()
        commits = [
            Commit(
                epoch=one.sequence.frontier.epoch,
                row=one.row,
                digest=extend_digest(one.sequence.frontier.digest, one.row.tokens),
            )
            for one in chosen
        ]
        if commits:
            try:
                answers: Iterable[CommitResult | SeqMTPError] = await self._store.commit(commits)
            except StoreUnreachable as error:
                answers = [error] * len(commits)
            for one, answer in zip(chosen, answers, strict=True):
                self._committed(one, answer)
        return 1e3 * (self._clock() - started)

    def _committed(self, one: Chosen, answer: CommitResult | SeqMTPError) -> None:
        """OK or DUP: the row is in the record, so it may be seen. Anything else: the record goes on without us."""
        assert self.scheduler is not None
        sequence, row, result = one
        if isinstance(answer, SeqMTPError):
            self._end(sequence, answer)
        elif answer in (CommitResult.OK, CommitResult.DUP):
            self.ledger.count("commits.dup", int(answer is CommitResult.DUP))
            self.scheduler.committed(sequence, row)
            self.ledger.record_row(row, result)
            self._requests.append(row)
            if row.request_id in self._cancelled:
                self._end_cancelled(sequence)
        else:
            self.ledger.count(f"commits.{answer.lower()}")
            self.scheduler.drop(sequence)
            self._spawn(self._end_as_recorded(sequence, answer))

    def _account(self, plan: StepPlan, report: StepReport, step_ms: float, commit_ms: float) -> None:
        """Enter the costs of a step of nothing but rounds. Mixed steps would charge prefill to speculation."""
        results = [result for result in report.rows if result.error is None]
        if plan.prefill or not results or len(results) != len(plan.verify):
            return
        depth = max(item.depth for item in plan.verify)
        costs = RoundCosts.of_step(report.costs, depth=depth, step_ms=step_ms, commit_ms=commit_ms)
        self.ledger.record_step(depth, results, costs)

    # ---- ends that are not a last row --------------------------------------------------------------------------

    def _end(self, sequence: Sequence, error: SeqMTPError) -> None:
        """It goes no further here; what is committed stays in the record."""
        assert self.scheduler is not None
        self.scheduler.drop(sequence)
        self._cancelled.discard(sequence.request.request_id)
        self._requests.end(sequence.request.request_id, error)
        self._wake()

    def _end_cancelled(self, sequence: Sequence) -> None:
        assert self.scheduler is not None
        self._cancelled.discard(sequence.request.request_id)
        self.scheduler.drop(sequence)
        self.ledger.count(f"finished.{FinishReason.CANCELLED}")
        self._requests.end_as(sequence.request.request_id, sequence.frontier.version, FinishReason.CANCELLED)
        self._wake()

    async def _end_as_recorded(self, sequence: Sequence, answer: CommitResult) -> None:
        """The record refused our row. Show how it ended, if it did; else say what is wrong with us."""
        request_id, version = sequence.request.request_id, sequence.frontier.version
        if answer is CommitResult.FENCED:
            return self._end(sequence, Fenced(f"{request_id} is owned by a newer epoch"))
        try:
            snapshot = await self._store.snapshot(request_id, version)
        except StoreUnreachable as error:
            return self._end(sequence, error)
        if snapshot is None:
            return self._end(sequence, RequestNotFound(f"{request_id}: its record is gone"))
        if snapshot.version < version:
            return self._end(sequence, StoreBehind(f"{request_id}: shown to {version}, recorded to {snapshot.version}"))
        if snapshot.finish is None:
            return self._end(
                sequence, StaleVersion(f"{request_id}: the record is at {snapshot.version}, not {version}")
            )
        for row in snapshot.rows:
            self._requests.append(row)
        self.ledger.count(f"finished.{snapshot.finish}")
        self._requests.end_as(request_id, snapshot.version, snapshot.finish)

    def _fail_cohort(self, cohort: int, error: InternalError) -> None:
        assert self.scheduler is not None
        for sequence in [one for one in self.scheduler.running if one.cohort == cohort]:
            self._end(sequence, error)

    # ---- what the target link says -----------------------------------------------------------------------------

    def target_found(self, info: TargetInfo) -> None:
        """Serve on this group from now on. What can no longer fit on it ends."""
        self.scheduler = self.scheduler or BatchScheduler(self.config, info)
        self.scheduler.info = info
        self._proposer_ready = True
        for sequence in list(self.scheduler.waiting):
            try:
                self.scheduler.fits(sequence.request)
            except ContextOverflow as error:
                self._end(sequence, error)
        self._wake()

    def target_lost(self) -> None:
        """All KV is gone: replay everything, once there is a group again."""
        assert self.scheduler is not None
        self.ledger.count("target_losses")
        self.ledger.count("replays", self.scheduler.lose_target())

    def target_given_up(self, error: NotReady) -> None:
        """Readers have waited long enough; the records stay."""
        for sequence in [] if self.scheduler is None else [*self.scheduler.running, *self.scheduler.waiting]:
            if sequence.state is not State.COMMITTING:
                self._end(sequence, error)

    # ---- tasks -------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        for event in self._work:
            event.set()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a driver task died", exc_info=error)
            self._requests.end_all(InternalError(f"a driver task died: {error}"))
