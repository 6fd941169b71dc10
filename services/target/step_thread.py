"""The engine's own thread: steps run in the order submitted, and a watchdog ends a process whose step hangs."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from seqmtp_serve.errors import InternalError
from seqmtp_serve.fault_points import FaultPoint, Reached, unharmed
from seqmtp_serve.ports import StepPlan, StepReport, TargetInfo
from services.accounts import Account
from services.process_levels import process_levels
from services.telemetry import step_span

GRACE_S = 5.0  # past its deadline a step gets this long before the process ends
PERIOD_S = 0.25
LEVELS_S = 0.5
EXIT_HUNG = 70  # EX_SOFTWARE

log = logging.getLogger(__name__)


class StepEngine(Protocol):
    """What the thread needs of an engine (seqmtp_serve/engine/target.py)."""

    def info(self) -> TargetInfo: ...

    def step(self, plan: StepPlan) -> StepReport: ...

    def levels(self) -> Mapping[str, float]: ...

    @property
    def is_idle(self) -> bool: ...

    def check(self) -> None:
        """Raises AssertionError when an invariant is broken; asked only when idle."""
        ...


def end_process() -> None:
    """A hung pass cannot be interrupted from Python. The launcher starts a new worker; requests are replayed."""
    os._exit(EXIT_HUNG)


class StepThread:
    """Submit from the event loop; the engine is touched by the thread alone."""

    def __init__(
        self, engine: StepEngine, *, on_hung: Callable[[], None] = end_process, reached: Reached = unharmed
    ) -> None:
        self._engine = engine
        self._reached = reached
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="target-engine")
        self._loop = asyncio.get_running_loop()
        self._on_hung = on_hung
        self._hung_at: float | None = None  # when the running step counts as hung; None between steps
        self._broken = False  # a step raised: the engine's state is no longer known
        self.failed = asyncio.Event()  # the same, for the event loop
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._levels: Mapping[str, float] = engine.levels()
        self._levels_at = 0.0

    def submit(self, plan: StepPlan, traceparent: str = "") -> asyncio.Future[StepReport]:
        """Queue a step, with the span it belongs to. The future raises InternalError if the engine broke."""
        arrived = time.monotonic()
        return asyncio.get_running_loop().run_in_executor(self._thread, self._step, plan, traceparent, arrived)

    def _step(self, plan: StepPlan, traceparent: str, arrived: float) -> StepReport:
        if self._broken:
            raise InternalError("an earlier step broke the engine; this worker is going away")
        queued_ms = 1e3 * (time.monotonic() - arrived)
        self._hung_at = time.monotonic() + plan.deadline_ms / 1e3 + GRACE_S
        try:
            self._reached(FaultPoint.BEFORE_PREPARE)
            with step_span("verify", [traceparent] if traceparent else []):
                report = self._engine.step(plan)
            report = replace(report, costs=replace(report.costs, queued=queued_ms))
            self._count(report)
            if self._engine.is_idle:
                self._engine.check()
            self._reached(FaultPoint.AFTER_VERIFY)
            return report
        except Exception as error:
            log.exception("step %d broke the engine", plan.step_id)
            self._broken = True
            self._loop.call_soon_threadsafe(self.failed.set)
            raise InternalError(f"step {plan.step_id} broke the engine: {error}") from error
        finally:
            self._hung_at = None

    def _count(self, report: StepReport) -> None:
        """Levels are taken when the engine is idle, and otherwise not too often: they cost a walk over the pages."""
        costs = report.costs
        self._counts["steps"] += 1
        self._counts["rows"] += costs.num_rows
        self._counts["forward_ms"] += costs.forward
        self._counts["draft_wait_ms"] += costs.draft_wait
        now = time.monotonic()
        if self._engine.is_idle or now - self._levels_at > LEVELS_S:
            self._levels, self._levels_at = self._engine.levels(), now

    def account(self, id: str, model: str) -> Account:
        """This worker's, as of its last steps."""
        gauges = {**self._levels, **process_levels()}
        return Account(kind="target", id=id, model=model, counters=dict(self._counts), gauges=gauges)

    async def watch(self) -> None:
        """Until cancelled: call `on_hung` once if a step outlives its deadline and the grace."""
        while True:
            await asyncio.sleep(PERIOD_S)
            hung_at = self._hung_at
            if hung_at is not None and time.monotonic() > hung_at:
                log.critical("a step has not come back: this worker hangs")
                self._on_hung()
                return

    def close(self) -> None:
        """Take no more steps; the one running is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)
