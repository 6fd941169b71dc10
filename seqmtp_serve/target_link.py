"""A target group as it comes and goes: connected, lost, looked for again, given up on after a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol

from seqmtp_serve.config import SchedulerConfig
from seqmtp_serve.errors import NotReady, Unavailable
from seqmtp_serve.ports import StepPlan, StepReport, TargetGroup, TargetInfo

STEP_GRACE_S = 1.0  # the target's own deadline comes first
INFO_WAIT_S = 5.0
_DRAINS = "the target group is ending: it finishes what it has, new requests wait for another"


class TargetWatcher(Protocol):
    """Who is told, from the event loop, in this order and each as often as it happens."""

    def target_found(self, info: TargetInfo) -> None: ...

    def target_lost(self) -> None: ...

    def target_given_up(self, error: NotReady) -> None:
        """No group for `target_wait_s`. The search goes on, and this is said again at each failed attempt."""
        ...


class Stepped(NamedTuple):
    """A step's report, and its milliseconds.

    `wall_ms` is what a step of the group takes with everything around it: from the report before, of any cohort, to
    this one. None if there was nothing to do for a while.
    """

    report: StepReport
    step_ms: float  # since it could begin: the time of steps before it at the target is theirs
    wall_ms: float | None


class TargetLink:
    """Sends steps, one loss at a time. `error` says why there is no group, None while there is one.

    `proposer_ready`, `draining` and `free_pages` are as the group last said.
    """

    def __init__(
        self, target: TargetGroup, config: SchedulerConfig, watcher: TargetWatcher, clock: Callable[[], float]
    ) -> None:
        self._target, self._config, self._watcher, self._clock = target, config, watcher, clock
        self.error: str | None = "not connected yet"
        self.given_up = False
        self.proposer_ready, self.draining, self.free_pages = True, False, 0
        self.ready = asyncio.Event()
        self._lost = asyncio.Event()
        self._connection = 0
        self._last_report = self._away_since = clock()
        self._busy = False

    @property
    def detail(self) -> str:
        """Why nothing new can run, empty when it can."""
        return self.error if self.error is not None else _DRAINS if self.draining else ""

    @property
    def away_s(self) -> float:
        """Seconds without a group; 0 while there is one."""
        return 0.0 if self.error is None else self._clock() - self._away_since

    async def keep(self) -> None:
        """Find a group, and another whenever it is lost. Runs until cancelled."""
        while True:
            info = await self._find()
            self.proposer_ready, self.draining, self.free_pages = True, False, info.num_pages
            self._watcher.target_found(info)
            self.error, self.given_up = None, False
            self._lost.clear()
            self.ready.set()
            await self._lost.wait()

    async def step(self, plan: StepPlan) -> Stepped | None:
        """The report, and how long it took. None: the group was lost, its watcher knows.

        A step sent while another runs waits for it at the target; that time is the other's, not this one's.
        """
        connection, sent = self._connection, self._clock()
        try:
            async with asyncio.timeout(plan.deadline_ms / 1e3 + STEP_GRACE_S):
                report = await self._target.step(plan)
        except (Unavailable, TimeoutError) as error:
            if connection == self._connection:  # else the loss was seen already
                self._lose(str(error) or "a step was not answered in time")
            return None
        self.proposer_ready, self.draining, self.free_pages = report.proposer_ready, report.draining, report.free_pages
        before, now = self._last_report, self._clock()
        was_busy, self._last_report, self._busy = self._busy, now, True
        return Stepped(
            report=report,
            step_ms=1e3 * (now - max(sent, before)),
            wall_ms=1e3 * (now - before) if was_busy else None,
        )

    def rest(self) -> None:
        """There is nothing to do: the time until the next report is not a round's."""
        self._busy = False

    def _lose(self, error: str) -> None:
        self._connection += 1
        self.error, self._away_since, self._busy = error, self._clock(), False
        self.ready.clear()
        self._watcher.target_lost()
        self._lost.set()

    async def _find(self) -> TargetInfo:
        started, delay = self._clock(), self._config.retry_first_s
        while True:
            try:
                async with asyncio.timeout(INFO_WAIT_S):
                    return await self._target.info()
            except (Unavailable, TimeoutError) as error:
                self.error = str(error) or "the target group does not answer"
                if self._clock() - started >= self._config.target_wait_s:
                    self.given_up = True
                    self._watcher.target_given_up(NotReady(f"no target group is ready: {self.error}"))
            await asyncio.sleep(delay)
            delay = min(2 * delay, self._config.retry_max_s)
