"""The depth controller against simulated costs and acceptance: regret, recovery, masks, and decisions made again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from random import Random

import pytest

from seqmtp_serve.frontier.depth import DepthController, Drafter
from seqmtp_serve.frontier.depth_choice import DepthChoice, DepthInputs, decide, option, replay
from seqmtp_serve.frontier.ledger import RoundCosts
from seqmtp_serve.frontier.step_times import StepTime, StepTimes
from seqmtp_serve.frontier.survival import GROUP_WEIGHT, NO_PRIOR, PRIOR_WEIGHT, Survival, credit
from seqmtp_serve.ports import RowResult, StepCosts, StepPlan, StepReport, Verify
from seqmtp_serve.request import Ref

REF = Ref(request_id="r", epoch=1, version=1, digest=bytes(16))
MAX_DEPTH = 3


@dataclass(kw_only=True)
class Machine:
    """step_ms = fixed + batch * row + drafts * draft + depth * chain, times the noise of a busy machine."""

    fixed: float
    row: float
    draft: float
    chain: float

    def step_ms(self, batch: int, depths: Sequence[int]) -> float:
        return self.fixed + batch * self.row + sum(depths) * self.draft + max(depths) * self.chain

    def forward_ms(self, batch: int, depths: Sequence[int]) -> float:
        return self.fixed + batch * self.row + 0.8 * sum(depths) * self.draft


@dataclass
class World:
    """A batch that is always full: `rates` are the true acceptances by position of each request's text."""

    machine: Machine
    rates: list[tuple[float, ...]]
    random: Random
    controller: DepthController = field(default_factory=lambda: DepthController("auto", MAX_DEPTH))
    tokens: float = 0.0
    ms: float = 0.0
    chosen: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.survival = [Survival(64.0) for _ in self.rates]
        self.depths: tuple[int, ...] = (0,) * len(self.rates)

    def run(self, steps: int) -> None:
        """Expected tokens and times without noise are added up; the controller sees draws and noisy clocks."""
        self.tokens = self.ms = 0.0
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        batch, depths = len(self.rates), self.depths
        drafters = [Drafter(limit=MAX_DEPTH, survival=one, num_left=1000, behind=1) for one in self.survival]
        choice = self.controller.choose(drafters, proposer_ready=True)  # for the round after this one
        self.tokens += expected_tokens(self.rates, depths)
        self.ms += self.machine.step_ms(batch, depths)
        self.chosen.append(max(depths))
        noise = 1.0 + 0.05 * self.random.random() + (1.5 if self.random.random() < 0.03 else 0.0)
        rows = []
        for rates, survival, depth in zip(self.rates, self.survival, depths, strict=True):
            accepted = next((j for j in range(depth) if self.random.random() >= rates[j]), depth)
            survival.add(depth, accepted)
            rows.append(RowResult(ref=REF, tokens=(0,) * (accepted + 1), drafted=depth, accepted=accepted))
        forward = self.machine.forward_ms(batch, depths) * noise
        rest = self.machine.step_ms(batch, depths) * noise - forward
        costs = RoundCosts(verify=forward, mtp=rest) if max(depths) else RoundCosts(main=forward, sync=rest)
        plan = StepPlan(step_id=1, verify=tuple(Verify(ref=REF, depth=depth) for depth in depths))
        report = StepReport(step_id=1, rows=tuple(rows), costs=StepCosts(), free_pages=0, proposer_ready=True)
        self.controller.observe(plan, report, costs, behind=sum(map(bool, depths)))
        self.depths = choice.depths

    @property
    def regret(self) -> float:
        """How much slower than the best fixed depth for all, which knows the truth."""
        batch = len(self.rates)
        fixed = max(
            expected_tokens(self.rates, (depth,) * batch) / self.machine.step_ms(batch, (depth,) * batch)
            for depth in range(MAX_DEPTH + 1)
        )
        return 1.0 - self.tokens / self.ms / fixed


def expected_tokens(rates: Sequence[Sequence[float]], depths: Sequence[int]) -> float:
    return sum(1.0 + sum(accumulate(one[:depth], mul)) for one, depth in zip(rates, depths, strict=True))


LAPTOP = Machine(fixed=16.4, row=2.6, draft=1.1, chain=1.6)  # docs/measurements.md, fitted by eye
FLAT = Machine(fixed=25.0, row=0.05, draft=0.02, chain=1.2)  # a large expert-parallel group: bound by weights
STEEP = Machine(fixed=4.0, row=4.0, draft=3.5, chain=0.3)  # no spare compute at all
TEXTS = {"prose": (0.62, 0.5, 0.45), "code": (0.85, 0.8, 0.75), "random": (0.03, 0.02, 0.02)}


@pytest.mark.covers(107)
@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("text", [*TEXTS, "mixed"])
@pytest.mark.parametrize("machine", [LAPTOP, FLAT, STEEP], ids=["laptop", "flat", "steep"])
def test_it_is_never_two_percent_slower_than_the_best_fixed_depth(machine: Machine, text: str, batch: int) -> None:
    """After its warm-up; measuring, probing, hysteresis and noise all count."""
    kinds = list(TEXTS.values())
    rates = [TEXTS[text] if text in TEXTS else kinds[index % 3] for index in range(batch)]
    world = World(machine, rates, Random(f"{text} {batch}"))
    world.run(200)
    world.run(600)
    assert world.regret <= 0.02


def test_masks_beat_every_fixed_depth_where_texts_differ() -> None:
    machine = Machine(fixed=4.0, row=4.0, draft=2.0, chain=0.3)
    world = World(machine, [TEXTS["code"], TEXTS["random"]] * 4, Random(0))
    world.run(200)
    world.run(600)
    assert world.regret < -0.05


def test_it_recovers_when_drafts_begin_to_be_accepted_and_falls_back_when_they_no_longer_are() -> None:
    world = World(LAPTOP, [TEXTS["random"]] * 4, Random(1))
    world.run(400)
    assert world.chosen[-200:].count(0) > 180
    world.rates = [TEXTS["code"]] * 4
    world.run(1000)
    world.run(300)
    assert world.regret <= 0.02
    world.rates = [TEXTS["random"]] * 4
    world.run(100)
    world.run(300)
    assert world.regret <= 0.02


def test_looks_stay_rare_and_cheap_where_drafts_never_pay() -> None:
    world = World(STEEP, [TEXTS["random"]] * 8, Random(2))
    world.run(200)
    world.run(1200)
    assert -0.001 <= world.regret <= 0.01
    assert sum(depth > 0 for depth in world.chosen[200:]) < 60


# ---- decisions, made again ---------------------------------------------------------------------------------------


def test_every_decision_can_be_made_again_from_the_ledger_alone() -> None:
    world = World(LAPTOP, [TEXTS["prose"], TEXTS["code"], TEXTS["random"]], Random(3))
    world.run(300)
    entries = json.loads(json.dumps(list(world.controller.ledger)))
    assert len(entries) == 300
    assert len({tuple(entry["depths"]) for entry in entries}) > 3
    assert replay(entries) == []
    entries[17]["depths"][0] += 1
    assert replay(entries) == [17]


def test_the_same_observations_give_the_same_decisions() -> None:
    worlds = [World(LAPTOP, [TEXTS["prose"]] * 4, Random(4)) for _ in range(2)]
    for world in worlds:
        world.run(200)
    assert list(worlds[0].controller.ledger) == list(worlds[1].controller.ledger)


# ---- one decision ------------------------------------------------------------------------------------------------


def inputs(*survival: tuple[float, ...], times: Sequence[StepTime | None], current: int = 0) -> DepthInputs:
    return DepthInputs(survivals=survival, times=tuple(times), current=current)


def test_the_depth_of_the_best_rate_wins_and_says_why() -> None:
    times = [StepTime(full_ms=10.0), StepTime(full_ms=11.0), StepTime(full_ms=14.0)]
    choice = decide(inputs((0.7, 0.2), times=times))
    assert (choice.depth, choice.depths, choice.fallback) == (1, (1,), False)
    assert choice.reason == "depth 1: 1.55 times plain decoding at batch 1"
    choice = decide(inputs((0.05, 0.0), times=times, current=1))
    assert (choice.depth, choice.depths, choice.fallback) == (0, (0,), True)
    assert choice.reason == "plain: depth 1 promises 0.95 times plain decoding at batch 1"


def test_credit_makes_a_look_of_what_is_not_known_well() -> None:
    times = [StepTime(full_ms=10.0), StepTime(full_ms=13.0, draft_ms=3.0)]
    assert decide(inputs((0.25,), times=times)).depths == (0,)
    look = decide(replace(inputs((0.25,), times=times), hopes=((0.35,),)))
    assert (look.depths, look.reason) == ((1,), "depth 1: a look, 0.96 times plain decoding at batch 1 without luck")
    assert decide(replace(inputs((0.25,), times=times), hopes=((0.29,),))).depths == (0,)
    unsure = [times[0], replace(times[1], unsure_ms=2.0)]
    assert decide(inputs((0.25,), times=unsure)).depths == (1,)


def test_a_request_that_is_behind_starts_only_if_its_rows_are_worth_it() -> None:
    times = [StepTime(full_ms=20.0), StepTime(full_ms=24.0, draft_ms=2.0)]
    decision = inputs((0.5,), (0.5,), times=times)
    assert decide(decision).depths == (1, 1)
    assert decide(replace(decision, starts=(0.0, 4.0))).depths == (1, 0)


def test_who_keeps_the_others_steps_going_is_drafted_for_first() -> None:
    """The same drafts, but a token of the first request is worth three of the second's."""
    times = [StepTime(full_ms=20.0), StepTime(full_ms=24.0, draft_ms=2.0)]
    decision = inputs((0.15,), (0.15,), times=times)
    assert decide(decision).depths == (0, 0)
    assert decide(replace(decision, worths=(1.5, 0.5))).depths == (1, 0)


def test_a_draft_is_made_only_where_it_pays_for_its_row() -> None:
    times = [StepTime(full_ms=10.0), StepTime(full_ms=16.0, draft_ms=1.5)]
    best = option(inputs((0.9,), (0.1,), (0.8,), (0.0,), times=times), 1)
    assert best.depths == (1, 0, 1, 0)
    assert best.hope == best.rate
    assert best.rate == pytest.approx((4 + 1.7) / (16.0 - 2 * 1.5))


def test_depth_is_bounded_by_what_there_is() -> None:
    def drafters(*limits: int) -> list[Drafter]:
        return [Drafter(limit=limit, survival=Survival(8.0), num_left=limit + 1) for limit in limits]

    static = DepthController("static", 3)
    assert static.choose(drafters(5, 1), proposer_ready=True) == DepthChoice(depths=(3, 1), depth=3, reason="static")
    assert static.choose(drafters(0, 0), proposer_ready=True).depths == (0, 0)
    assert static.choose(drafters(3), proposer_ready=False).depths == (0,)
    assert DepthController("static", 0).choose(drafters(3), proposer_ready=True).depths == (0,)
    auto = DepthController("auto", 3)
    for _ in range(50):
        first, second = auto.choose(drafters(2, 0), proposer_ready=True).depths
        assert first <= 2
        assert second == 0


# ---- what decisions are made from --------------------------------------------------------------------------------


def test_acceptance_is_the_requests_own_shrunk_to_the_others_of_its_group() -> None:
    group = Survival(512.0)
    own = Survival(64.0, group=group)
    for _ in range(48):
        own.add(1, 0)
    for _ in range(152):
        group.add(2, 2)
    known = 152 + PRIOR_WEIGHT
    usual = (152 + PRIOR_WEIGHT * NO_PRIOR) / known
    weight = GROUP_WEIGHT * known / (GROUP_WEIGHT + known)
    rate = weight * min(0.95, usual) / (48 + weight)
    found = own.outlook(2, 100.0)
    assert found.expected[0] == pytest.approx(rate, abs=1e-3)
    assert own.reached == [
        48.0
    ]  # it never got to position 1: it is expected to fall behind the others there as it does before
    assert found.expected[1] == pytest.approx(rate * rate, rel=0.05)
    assert all(hoped > expected for hoped, expected in zip(found.hoped, found.expected, strict=True))


def test_what_nobody_drafts_is_forgotten_round_by_round_and_with_each_request_that_joins() -> None:
    group = Survival(256.0)
    own = Survival(64.0, group=group)
    for _ in range(100):
        own.add(2, 1)
    before = own.outlook(2, 1.0).expected
    for _ in range(4000):
        own.add(1, 1)
    first, second = own.outlook(2, 1.0).expected
    assert before[0] < first
    assert before[1] < 0.1 < 0.4 < second, "position 1 is expected to be like position 0 again"
    for _ in range(200):
        group.fade(1 / 16)
    assert Survival(64.0, group=group).outlook(1, 1.0).expected[0] == pytest.approx(NO_PRIOR, abs=0.01)


def test_credit_grows_with_doubt_and_with_what_is_left() -> None:
    assert credit(0.5, 8.0, 100.0) > credit(0.5, 8.0, 10.0) > credit(0.5, 80.0, 10.0) > 0.0
    assert credit(0.999, 1.0, 1e6) <= 0.00101
    pieces = [credit(0.5, 7.0, 8.0 * s) / credit(0.5, 7.0, 0.8) for s in (0.1, 0.5, 2.0, 10.0, 20.0)]
    assert pieces == pytest.approx([1.0, 1.496, 2.0, 2.623, 4.42], abs=0.02)


def test_old_rounds_fade() -> None:
    survival = Survival(16.0)
    for _ in range(200):
        survival.add(1, 0)
    for _ in range(40):
        survival.add(1, 1)
    assert survival.outlook(1, 1.0).expected[0] > 0.75


# ---- what steps take ---------------------------------------------------------------------------------------------


def learn(times: StepTimes, num: int, *batches: int, depths: Sequence[int] = (0, 1, 2), slow: float = 1.0) -> None:
    """Steps of LAPTOP, a hair apart in time."""
    for turn in range(num):
        for batch in batches:
            for depth in depths:
                ms = slow * LAPTOP.step_ms(batch, (depth,) * batch) * (1.01 if turn % 2 else 0.99)
                times.observe(batch=batch, depth=depth, drafts=batch * depth, behind=0, ms=ms)


def test_nothing_is_known_of_steps_before_one_was_measured() -> None:
    times = StepTimes()
    assert times.curve(4, 3, 0) == ()
    assert decide(inputs((0.9,), times=())).reason == "plain: no step was measured yet"


def test_steps_are_a_line_and_one_size_of_batch_teaches_the_next() -> None:
    times = StepTimes()
    learn(times, 30, 4, 6)
    for batch, depth, tolerance in ((4, 1, 0.03), (7, 2, 0.05), (5, 3, 0.05), (8, 1, 0.1), (16, 2, 0.1)):
        found = times.curve(batch, 3, 0)[depth]
        assert found.full_ms == pytest.approx(LAPTOP.step_ms(batch, (depth,) * batch), rel=tolerance)
    near, far = times.curve(6, 3, 0), times.curve(16, 3, 0)
    assert near[0].unsure_ms == 0.0
    assert near[2].unsure_ms / near[2].full_ms < far[2].unsure_ms / far[2].full_ms


def test_what_is_not_looked_at_grows_vague_and_a_slow_machine_is_slow_at_every_depth() -> None:
    times = StepTimes()
    learn(times, 40, 4)
    before = times.curve(4, 2, 0)
    learn(times, 400, 4, depths=(0,), slow=1.2)
    after = times.curve(4, 2, 0)
    assert after[2].unsure_ms > 1.5 * before[2].unsure_ms
    assert after[0].full_ms == pytest.approx(1.2 * before[0].full_ms, rel=0.02)
    assert after[2].full_ms == pytest.approx(1.2 * before[2].full_ms, rel=0.06), "though nobody drafted since"


def test_a_delayed_step_teaches_little() -> None:
    times = StepTimes()
    learn(times, 40, 4)
    before = times.curve(4, 1, 0)[0].full_ms
    times.observe(batch=4, depth=0, drafts=0, behind=0, ms=100 * before)
    assert times.curve(4, 1, 0)[0].full_ms < 1.05 * before


def test_rows_to_catch_up_on_have_their_price() -> None:
    times = StepTimes()
    learn(times, 30, 4)
    for _ in range(6):
        times.observe(batch=4, depth=1, drafts=4, behind=200, ms=LAPTOP.step_ms(4, (1,) * 4) + 200 * 0.05)
        learn(times, 4, 4)
    assert times.behind_ms(4) == pytest.approx(0.05, rel=0.1)
