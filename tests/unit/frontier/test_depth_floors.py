"""Where chains end, by what a row and a pass cost; and that depth is chosen knowing that they do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seqmtp_serve.frontier.depth import DepthController, Drafter
from seqmtp_serve.frontier.depth_choice import LEAST_FLOOR, DepthChoice, DepthInputs, decide, floors, option
from seqmtp_serve.frontier.ledger import RoundCosts
from seqmtp_serve.frontier.step_times import StepTime
from seqmtp_serve.frontier.survival import LEFT_OUT, Survival, num_rows
from seqmtp_serve.ports import RowResult, StepCosts, StepPlan, StepReport, Verify
from seqmtp_serve.request import Ref

# A plain step of one request takes 10 ms, a pass of the module 1 ms, a verified draft 2 ms.
TIMES = (
    StepTime(full_ms=10.0),
    StepTime(full_ms=13.0, draft_ms=2.0),
    StepTime(full_ms=16.0, draft_ms=2.0),
    StepTime(full_ms=19.0, draft_ms=2.0),
)


def test_a_draft_is_left_out_below_the_price_of_its_row_and_nothing_is_drafted_behind_one_that_is_too_unsure() -> None:
    choice = decide(DepthInputs(survivals=((0.9, 0.7, 0.5),), times=TIMES))
    assert choice.depths == (3,)
    rate = (1 + 0.9 + 0.7 + 0.5) / 19.0
    assert choice.row_price == pytest.approx(2.0 * rate, abs=1e-4)
    assert choice.pass_price == pytest.approx(1.0 * rate, abs=1e-4)
    keep, goes_on = floors(choice, 0)
    assert keep == pytest.approx((1 - LEFT_OUT) * 2.0 * rate, abs=1e-3)  # its row of the module is spent by then
    assert keep < goes_on < 1.0


def test_a_pass_is_shared_by_the_batch_and_a_token_that_is_worth_more_may_be_less_sure() -> None:
    batch = tuple(replace(one, full_ms=one.full_ms + 3 * depth * 2.0) for depth, one in enumerate(TIMES))
    choice = decide(DepthInputs(survivals=((0.9,),) * 4, times=batch[:2], worths=(1.6, 0.8, 0.8, 0.8)))
    single = decide(DepthInputs(survivals=((0.9, 0.8),), times=TIMES[:3]))
    assert choice.pass_price < single.pass_price
    assert floors(choice, 0)[0] == pytest.approx(floors(choice, 1)[0] / 2, abs=1e-3)


def test_a_fixed_depth_has_no_floor_and_a_weighed_one_always_has() -> None:
    assert floors(None, 0) == floors(DepthChoice(depths=(3,), reason="static"), 0) == (0.0, 0.0)
    free = decide(DepthInputs(survivals=((0.9,),), times=(StepTime(full_ms=10.0), StepTime(full_ms=10.0))))
    assert floors(free, 0) == (LEAST_FLOOR, LEAST_FLOOR)


def test_a_depth_is_taken_where_most_of_its_drafts_would_not_be_verified() -> None:
    """As many tokens, and a fifth of the rows: not worth it if all rows are paid, well worth it if few are."""
    times = (StepTime(full_ms=10.0), StepTime(full_ms=12.2, draft_ms=2.0))
    inputs = DepthInputs(survivals=((0.15,),), times=times)
    assert decide(inputs).depths == (0,)
    assert decide(replace(inputs, made=((1.0,),), rows=((0.2,),))).depths == (1,)


def test_passes_that_no_chain_goes_on_to_are_not_paid() -> None:
    inputs = DepthInputs(survivals=((0.9, 0.1, 0.1),), times=TIMES, made=((1.0, 0.1, 0.05),), rows=((1.0, 0.1, 0.05),))
    ms = (1 + 0.9 + 0.1 + 0.1) / option(inputs, 3).rate
    assert option(inputs, 3).depths == (3,)
    assert ms == pytest.approx(10 + 1 + 0.1 * 1 + 0.05 * 1 + 2 * (1.0 + 0.1 + 0.05))
    four = replace(inputs, survivals=inputs.survivals * 4, made=inputs.made * 4, rows=inputs.rows * 4)
    assert option(four, 3).rate > 0.0  # of four, one goes on more often than a single one does
    (alone,), together = (1 - 0.1,), (1 - 0.1) ** 4
    assert together < alone


def test_what_was_made_and_verified_is_learned_position_by_position() -> None:
    group = Survival(256.0)
    own = Survival(64.0, group=group)
    assert own.outlook(2, 1.0).made == own.outlook(2, 1.0).rows == (1.0, 1.0)
    for _ in range(200):
        own.add(2, 0, made=1, verified=0)
    made, rows = own.outlook(2, 1.0)[2:]
    assert made[0] == pytest.approx(1.0, abs=0.02)
    assert made[1] == pytest.approx(0.0, abs=0.06)
    assert rows[0] == pytest.approx(LEFT_OUT, abs=0.05)
    assert Survival(64.0, group=group).outlook(1, 1.0).rows[0] < 0.3, "a newcomer is taken to be like its group"
    for _ in range(400):
        own.add(2, 2, made=2, verified=2)
    assert min(*own.outlook(2, 1.0).made, *own.outlook(2, 1.0).rows) > 0.95


def test_a_draft_that_was_left_out_brought_nothing() -> None:
    own = Survival(64.0)
    for _ in range(60):
        own.add(1, 0, made=1, verified=0)
    assert own.outlook(1, 1.0).expected[0] < 0.1


def test_steps_teach_what_passes_and_rows_take_by_those_there_were() -> None:
    """Asked for three drafts each time; a pass takes 3 ms, a row 2 ms, one that was left out a fifth of it."""
    controller = DepthController("auto", 3)
    ref = Ref(request_id="r", epoch=1, version=1, digest=bytes(16))
    for index in range(400):
        depth, made, verified = (0, 0, 0) if index % 4 == 0 else (3, 1 + index % 3, index % 2)
        row = RowResult(ref=ref, tokens=(1,), drafted=verified, chances=(0.5,) * made)
        report = StepReport(step_id=1, rows=(row,), costs=StepCosts(), free_pages=0, proposer_ready=True)
        plan = StepPlan(step_id=1, verify=(Verify(ref=ref, depth=depth),))
        controller.observe(plan, report, RoundCosts(main=20.0 + 3.0 * made + 2.0 * num_rows(made, verified)))
    curve = controller._times.curve(1, 3, 0)
    assert curve[0].full_ms == pytest.approx(20.0, rel=0.03)
    assert curve[3].full_ms - curve[2].full_ms == pytest.approx(5.0, rel=0.15)
    assert curve[3].draft_ms == pytest.approx(2.0, rel=0.25)


def test_the_controller_tells_its_decisions_how_far_chains_go() -> None:
    controller = DepthController("auto", 2)
    survival = Survival(64.0)
    for _ in range(50):
        survival.add(2, 0, made=1, verified=0)
    ref = Ref(request_id="r", epoch=1, version=1, digest=bytes(16))
    for _ in range(4):
        report = StepReport(
            step_id=1, rows=(RowResult(ref=ref, tokens=(1,)),), costs=StepCosts(), free_pages=0, proposer_ready=True
        )
        controller.observe(StepPlan(step_id=1, verify=(Verify(ref=ref, depth=0),)), report, RoundCosts(main=10.0))
    choice = controller.choose([Drafter(limit=2, survival=survival, num_left=90)], proposer_ready=True)
    assert choice.inputs is not None
    assert choice.inputs.made[0][1] < 0.5 < choice.inputs.made[0][0]
    assert choice.inputs.rows[0][0] < 0.5
