"""The depth controller against simulated costs and acceptance: regret, recovery, masks, and decisions made again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest

from seqmtp_serve.frontier.depth import PROBE_SHARE, DepthController, Drafter
from seqmtp_serve.frontier.depth_choice import DepthChoice, DepthInputs, decide, option, replay
from seqmtp_serve.frontier.ledger import RoundCosts
from seqmtp_serve.frontier.step_times import MEASURE_STEPS, StepTime, StepTimes, never_falling
from seqmtp_serve.frontier.survival import GROUP_WEIGHT, Survival, survivals
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
        drafters = [Drafter(limit=MAX_DEPTH, survival=one) for one in self.survival]
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
        self.controller.observe(plan, report, costs)
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
    return sum(1.0 + sum(survivals(one[:depth])) for one, depth in zip(rates, depths, strict=True))


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


def test_looking_is_rationed() -> None:
    """A depth that loses much is looked at less often, and the whole of it costs its share of the time."""
    world = World(STEEP, [TEXTS["random"]] * 8, Random(2))
    world.run(200)
    world.run(1200)
    assert -0.001 <= world.regret <= 2 * PROBE_SHARE
    assert 0 < sum(depth > 0 for depth in world.chosen[200:]) < 40


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


def test_a_depth_in_use_is_kept_until_another_is_clearly_better() -> None:
    times = [StepTime(full_ms=10.0), StepTime(full_ms=15.0)]
    for survival, current, depth in ((0.51, 0, 0), (0.49, 1, 1), (0.53, 0, 1), (0.47, 1, 0)):
        assert decide(inputs((survival,), times=times, current=current)).depth == depth


def test_a_draft_is_made_only_where_it_pays_for_its_row() -> None:
    times = [StepTime(full_ms=10.0), StepTime(full_ms=16.0, draft_ms=1.5)]
    best = option(inputs((0.9,), (0.1,), (0.8,), (0.0,), times=times), 1)
    assert best.depths == (1, 0, 1, 0)
    assert best.rate == pytest.approx((4 + 1.7) / (16.0 - 2 * 1.5))


def test_depth_is_bounded_by_what_there_is() -> None:
    def drafters(*limits: int) -> list[Drafter]:
        return [Drafter(limit=limit, survival=Survival(8.0)) for limit in limits]

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


def test_acceptance_is_the_requests_own_shrunk_to_the_groups() -> None:
    own, group = Survival(64.0), Survival(512.0)
    group.add(3, 3)
    for _ in range(48):
        own.add(2, 0)
    prior = (0.8, 0.5)
    assert own.rates(2, prior, GROUP_WEIGHT) == pytest.approx((GROUP_WEIGHT * 0.8 / (48 + GROUP_WEIGHT), 0.5))
    assert own.reached == [48.0]  # position 1 was never reached: nothing is known of it
    assert survivals((0.5, 0.5, 0.2)) == pytest.approx((0.5, 0.25, 0.05))


def test_old_rounds_fade() -> None:
    survival = Survival(16.0)
    for _ in range(200):
        survival.add(1, 0)
    for _ in range(40):
        survival.add(1, 1)
    assert survival.rates(1)[0] > 0.85


def test_times_are_medians_scaled_to_the_batch() -> None:
    times = StepTimes()
    for batch, ms in ((4, 20.0), (5, 22.0), (6, 24.0), (7, 26.0)) * 12:
        times.observe(batch=batch, depth=0, drafts=0, forward_ms=ms, total_ms=ms)
    times.observe(batch=4, depth=0, drafts=0, forward_ms=900.0, total_ms=900.0)
    found = times.get(6, 0)
    assert found is not None
    assert found.full_ms == pytest.approx(24.0, rel=0.05)
    assert times.get(6, 1) is None
    assert times.get(8, 0) is None
    for _ in range(MEASURE_STEPS):
        times.observe(batch=4, depth=1, drafts=4, forward_ms=24.0, total_ms=27.0)
    one = times.get(4, 1)
    assert one is not None
    assert one.draft_ms == pytest.approx(1.0, rel=0.1)
    assert one.full_ms == pytest.approx(27.0)


def test_a_deeper_step_never_seems_cheaper() -> None:
    assert never_falling([1.0, 2.0, 3.0], [1, 1, 1]) == [1.0, 2.0, 3.0]
    assert never_falling([10.0, 14.0, 13.0, 12.0], [4, 1, 1, 2]) == [10.0, 12.75, 12.75, 12.75]
    assert never_falling([3.0, 1.0, 2.0], [1, 3, 1]) == [1.5, 1.5, 2.0]
    times = StepTimes()
    for depth, ms in ((0, 10.0), (1, 12.0), (2, 11.0)):
        for _ in range(MEASURE_STEPS):
            times.observe(batch=1, depth=depth, drafts=depth, forward_ms=ms, total_ms=ms)
    found = [one.full_ms if one is not None else None for one in times.curve(1, 3)]
    assert found == [pytest.approx(10.0), pytest.approx(11.5), pytest.approx(11.5), None]
