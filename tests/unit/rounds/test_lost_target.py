"""How long a step took, for itself and for the group: steps of two cohorts wait for each other."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from seqmtp_serve.config import SchedulerConfig
from seqmtp_serve.fake import FakeTargetGroup
from seqmtp_serve.ports import StepPlan, StepReport
from seqmtp_serve.target_link import Stepped, TargetLink, TargetWatcher


class OneByOne(FakeTargetGroup):
    """Each step takes 10 ms of `now`, after the steps before it."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self._turn = 0.0, asyncio.Lock()

    async def step(self, plan: StepPlan) -> StepReport:
        async with self._turn:
            report = await super().step(plan)
            self.now += 0.010
            return report


class Unwatched:
    def target_found(self, info: object) -> None: ...

    def target_lost(self) -> None: ...

    def target_given_up(self, error: object) -> None: ...


async def test_a_step_that_waits_for_another_is_charged_its_own_time_only() -> None:
    group = OneByOne()
    link = TargetLink(group, SchedulerConfig(), cast(TargetWatcher, Unwatched()), lambda: group.now)

    async def step(number: int) -> Stepped:
        stepped = await link.step(StepPlan(step_id=number))
        assert stepped is not None
        return stepped

    first = await step(1)
    assert first.wall_ms is None, "nobody knows since when there was work"
    second, third = await asyncio.gather(step(2), step(3))
    assert [one.step_ms for one in (first, second, third)] == pytest.approx([10, 10, 10])
    assert [second.wall_ms, third.wall_ms] == pytest.approx([10, 10])
    group.now += 0.005  # drafting and committing, with nothing else at the target
    assert (await step(4)).wall_ms == pytest.approx(15)
    link.rest()
    group.now += 7.0
    assert (await step(5)).wall_ms is None
