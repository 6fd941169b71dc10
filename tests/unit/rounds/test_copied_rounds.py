"""A round whose drafts will be copied: how many are verified is decided when they are known, by a row's price."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from test_driver import FAST, assert_exactly_once, driving, generate, make_request

from seqmtp_serve.fake import FAKE_INFO, FakeTargetGroup
from seqmtp_serve.frontier.depth import DepthController
from seqmtp_serve.frontier.depth_choice import DepthChoice, DepthInputs, decide, num_copies, replay
from seqmtp_serve.frontier.ledger import RoundCosts
from seqmtp_serve.frontier.memory_store import MemoryFrontierStore
from seqmtp_serve.frontier.step_times import StepTime
from seqmtp_serve.ports import Prefill, RowResult, StepCosts, StepPlan, StepReport, Verify
from seqmtp_serve.request import Ref

SURVIVALS = (0.9, 0.5, 0.1)
TIMES = (StepTime(full_ms=10.0), StepTime(full_ms=15.0, draft_ms=2.0))


class Copying(FakeTargetGroup):
    """Says before every other round that it will copy, and does."""

    proposer_ready, survivals = True, SURVIVALS

    async def step(self, plan: StepPlan) -> StepReport:
        return replace(await super().step(plan), proposer_ready=self.proposer_ready)

    def _prefill(self, held: Any, item: Prefill) -> RowResult:
        row = super()._prefill(held, item)
        return replace(row, next_copied=self.survivals) if item.last else row

    def _verify(self, held: Any, item: Verify) -> RowResult:
        is_copy = item.ref.version % 2 == 1
        row = replace(super()._verify(held, item), copied=is_copy and item.depth > 0)
        return row if is_copy else replace(row, next_copied=self.survivals)


def test_a_copied_draft_is_verified_where_it_pays_for_its_row() -> None:
    choice = decide(DepthInputs(survivals=((0.1,),), times=TIMES))
    assert choice.depths == (0,)
    assert choice.row_price == pytest.approx(2.0 / 10.0)
    assert num_copies(choice, 0, SURVIVALS) == 2
    assert num_copies(choice, 0, (0.1, 0.9)) == 0  # those behind a draft that does not pay cannot be had
    assert num_copies(choice, 0, ()) == 0


def test_without_measurements_all_copies_are_verified() -> None:
    assert num_copies(None, 0, SURVIVALS) == 3
    assert num_copies(DepthChoice(depths=(2,), reason="static"), 0, SURVIVALS) == 3


def test_a_token_of_who_keeps_the_others_steps_going_is_worth_more_rows() -> None:
    choice = decide(DepthInputs(survivals=((0.1,), (0.1,)), times=TIMES, worths=(1.8, 0.2)))
    assert (num_copies(choice, 0, SURVIVALS), num_copies(choice, 1, SURVIVALS)) == (2, 0)


def test_steps_of_copies_teach_what_a_row_takes_and_nothing_of_the_module() -> None:
    """A service whose rows take 1 ms each and whose module takes 20 ms: plain steps, and such with three copies."""
    controller = DepthController("auto", 3)
    ref = Ref(request_id="r", epoch=1, version=1, digest=bytes(16))
    for index in range(200):
        depth = 3 * (index % 2)
        row = RowResult(ref=ref, tokens=(0,) * (depth + 1), drafted=depth, accepted=depth, copied=depth > 0)
        report = StepReport(step_id=1, rows=(row,), costs=StepCosts(), free_pages=0, proposer_ready=True)
        plan = StepPlan(step_id=1, verify=(Verify(ref=ref, depth=depth),))
        controller.observe(plan, report, RoundCosts(main=10.0 + depth))
    curve = controller._times.curve(1, 3, 0)
    assert curve[0].full_ms == pytest.approx(10.0, rel=0.03)
    assert curve[3].draft_ms == pytest.approx(1.0, rel=0.15)
    assert curve[3].full_ms > 13.3  # a depth of the module costs what it was taken to cost at first


@pytest.mark.covers(107)
async def test_copies_have_their_own_depth_and_reason_and_say_nothing_of_the_modules_drafts() -> None:
    request = make_request("a", max_tokens=100)
    config = replace(FAST, depth_policy="auto")
    async with driving(Copying(), MemoryFrontierStore(), config) as driver:
        rows = await generate(driver, request)
        notes = driver.notes.of("a")
        counters = driver.status().counters
    assert_exactly_once(request, rows)
    copied = [row for row in rows if row.copied]
    assert copied
    assert all(row.depth_reason.startswith(f"copied: {row.drafted}, right with 0.90") for row in copied)
    assert counters["copied.rounds"] == len(copied)
    assert counters["copied.drafted"] == sum(row.drafted for row in copied)
    assert replay(json.loads(json.dumps(list(driver.depth.ledger)))) == []
    noted = [note for note in notes if note.copy_survivals and note.choice is not None]
    assert noted
    for note in noted:
        assert note.depth == num_copies(note.choice, note.place, note.copy_survivals)
    module_rounds = [row for row in rows[1:] if not row.copied and row.drafted]
    drafted = sum(group.reached[0] for group in driver.depth._groups.values() if group.reached)
    assert drafted <= len(module_rounds)


async def test_copies_go_on_while_no_proposer_is_there() -> None:
    request = make_request("a", max_tokens=60)
    target = Copying()
    target.proposer_ready = False
    async with driving(target, MemoryFrontierStore(), replace(FAST, depth_policy="auto")) as driver:
        rows = await generate(driver, request)
    assert_exactly_once(request, rows)
    assert any(row.copied for row in rows)
    assert not any(row.drafted for row in rows if not row.copied)


@pytest.mark.parametrize(
    ("config", "asked", "most"),
    [
        ({"depth_policy": "auto", "max_copied": 8}, 3, 8),
        ({"depth_policy": "auto", "max_copied": 8}, 2, 2),  # less than the service's depth: the caller wants no more
        ({"depth_policy": "auto", "max_copied": 2}, 3, 3),
        ({"depth_policy": "static"}, 3, 3),
    ],
)
async def test_copies_may_be_deeper_than_the_module_drafts(config: dict[str, Any], asked: int, most: int) -> None:
    request = make_request("a", max_tokens=100)
    request = replace(request, params=replace(request.params, max_depth=asked))
    target = Copying()
    target.survivals = (0.99,) * 12
    async with driving(target, MemoryFrontierStore(), replace(FAST, max_depth=3, **config)) as driver:
        rows = await generate(driver, request)
    assert_exactly_once(request, rows)
    assert max(row.drafted for row in rows if row.copied) == most
    assert all(row.drafted <= 3 for row in rows if not row.copied)


async def test_long_copies_of_many_leave_room_for_prompts() -> None:
    """A step holds 40 rows: five rounds of depth 3 take 20, and half of the rest is for prompts."""
    target = Copying(replace(FAKE_INFO, num_pages=200))
    target.survivals = (0.99,) * 8
    steps: list[tuple[int, int]] = []
    run = target.step

    async def counted(plan: StepPlan) -> StepReport:
        steps.append((sum(one.depth + 1 for one in plan.verify), sum(one.stop - one.start for one in plan.prefill)))
        return await run(plan)

    target.step = counted  # type: ignore[method-assign]
    config = replace(FAST, max_batch=5, step_tokens=40, depth_policy="auto", max_copied=8)
    async with driving(target, MemoryFrontierStore(), config) as driver:
        requests = [make_request(f"r{index}", max_tokens=40) for index in range(5)]
        for one, rows in zip(requests, await asyncio.gather(*(generate(driver, one) for one in requests)), strict=True):
            assert_exactly_once(one, rows)
    assert max(rounds for rounds, _ in steps) > 20
    assert all(rounds + prompts <= 40 and rounds <= 30 for rounds, prompts in steps)
