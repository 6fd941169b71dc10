"""Who comes in next: who was in the middle of a text, then priority, then the caller with least running, then age."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seqmtp_serve.config import SchedulerConfig
from seqmtp_serve.errors import Overloaded
from seqmtp_serve.fake import FAKE_INFO, fake_piece
from seqmtp_serve.frontier.depth_choice import DepthChoice
from seqmtp_serve.frontier.memory_store import MemoryFrontierStore
from seqmtp_serve.frontier.scheduler import BatchScheduler
from seqmtp_serve.frontier.sequence import Sequence
from seqmtp_serve.live_requests import LiveRequests
from seqmtp_serve.request import Request, SamplingParams


async def sequence(name: str, arrival: int, **more: str) -> Sequence:
    """As a record with this meta gives it."""
    request = Request(request_id=name, prompt_ids=(1, 2, 3), params=SamplingParams(max_tokens=5))
    snapshot = await MemoryFrontierStore().acquire(request, "me", 10.0, meta=more)
    return LiveRequests(lambda _: fake_piece).restart(snapshot, arrival)


def admitted(scheduler: BatchScheduler) -> list[str]:
    plan = scheduler.plan(0, 1, lambda coming: DepthChoice(depths=(0,) * len(coming), reason="test"))
    return [] if plan is None else [one.ref.request_id for one in plan.admit]


def a_scheduler(max_batch: int, **more: int) -> BatchScheduler:
    config = SchedulerConfig(max_batch=max_batch, step_tokens=64, **more)  # type: ignore[arg-type]
    return BatchScheduler(config, replace(FAKE_INFO, max_batch=max_batch, num_pages=256))


async def test_callers_take_turns_however_many_one_of_them_sends() -> None:
    scheduler = a_scheduler(4)
    for arrival in range(6):
        scheduler.add(await sequence(f"many{arrival}", arrival, caller="many"))
    scheduler.add(await sequence("few", 6, caller="few"))
    scheduler.add(await sequence("nobody", 7))
    assert admitted(scheduler) == ["many0", "few", "nobody", "many1"]
    scheduler.check()


async def test_without_callers_it_is_first_come_first_served() -> None:
    scheduler = a_scheduler(3)
    for arrival in (2, 0, 1, 3):
        scheduler.add(await sequence(f"r{arrival}", arrival))
    assert admitted(scheduler) == ["r0", "r1", "r2"]


async def test_a_lower_priority_goes_first_and_who_was_in_the_middle_of_a_text_before_all() -> None:
    scheduler = a_scheduler(3)
    scheduler.add(await sequence("late", 0, priority="5"))
    scheduler.add(await sequence("usual", 1))
    scheduler.add(await sequence("urgent", 2, priority="-1"))
    replayed = await sequence("replayed", 3, priority="9")
    replayed.frontier = replace(replayed.frontier, output_ids=(7,))
    scheduler.add(replayed)
    assert admitted(scheduler) == ["replayed", "urgent", "usual"]


async def test_queued_tokens_are_bounded() -> None:
    scheduler = a_scheduler(1, max_waiting_tokens=7)
    request = Request(request_id="r", prompt_ids=(1, 2, 3), params=SamplingParams(max_tokens=5))
    scheduler.accepts(replace(request, prompt_ids=(1,) * 50), 0)  # nobody waits: whatever its length
    for arrival in range(2):
        scheduler.add(await sequence(f"r{arrival}", arrival))
    with pytest.raises(Overloaded, match="6 tokens wait"):
        scheduler.accepts(request, 2)
    scheduler.accepts(replace(request, prompt_ids=(1,)), 2)
