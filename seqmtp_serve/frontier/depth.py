"""The depth controller: what to measure, what is known, and the ledger of decisions. The text never depends on it.

The depth of a round is chosen one step before it runs, because drafts are made while the step before is committed: it
goes to the target as a hint, and the proposer drafts no more than will be verified.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from seqmtp_serve.frontier.depth_choice import DepthChoice, DepthInputs, decide, option
from seqmtp_serve.frontier.ledger import RoundCosts
from seqmtp_serve.frontier.step_times import StepTimes, octave
from seqmtp_serve.frontier.survival import GROUP_WEIGHT, Survival, survivals
from seqmtp_serve.ports import StepPlan, StepReport

GROUP_MEMORY = 128.0  # rounds
PROBE_STEPS = 4  # the first step after plain decoding catches up on rows and is not counted
PROBE_SHARE = 0.005  # of the time may go into looking at other depths
PROBE_GAP = 32  # decisions between two looks
STOP_SLACK = 0.95  # a deeper depth is first measured while the one before comes this near to the best
LEDGER_LEN = 1024

Policy = Literal["static", "auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """A request of the next round: the drafts it can use at most, and what became of its drafts so far."""

    limit: int
    survival: Survival


@dataclass(slots=True)
class _Octave:
    """What is decided for batches of about one size."""

    current: int = 0
    allowance_ms: float = 0.0  # for probes
    since_probe: int = 0
    probe: int = 0
    probe_left: int = 0


@dataclass(slots=True)
class DepthController:
    """`static`: as deep as allowed. `auto`: what pays by `depth_choice.py`, with a rationed look at the neighbours.

    Deterministic and without a clock: the same observations and questions give the same decisions.
    """

    policy: Policy
    max_depth: int
    ledger: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=LEDGER_LEN))
    _times: StepTimes = field(default_factory=StepTimes)
    _survival: Survival = field(default_factory=lambda: Survival(GROUP_MEMORY))
    _octaves: dict[int, _Octave] = field(default_factory=dict)
    _was_plain: bool = True

    def choose(self, drafters: Sequence[Drafter], *, proposer_ready: bool) -> DepthChoice:
        """The depths of the next round of these requests.

        Without a proposer nothing is asked that would be waited for.
        """
        limits = [min(self.max_depth, one.limit) for one in drafters]
        limit = max(limits, default=0)
        if limit <= 0:
            return _plain(drafters, "speculation is off, or only one token is left")
        if not proposer_ready:
            return _plain(drafters, "no proposer is ready")
        if self.policy == "static":
            return DepthChoice(depths=tuple(limits), depth=limit, reason="static")
        inputs = self._inputs(drafters, limits)
        choice = decide(inputs)
        if inputs.forced is None:
            self._octaves[octave(inputs.batch)].current = choice.depth
        self.ledger.append(choice.to_json())
        return choice

    def observe(self, plan: StepPlan, report: StepReport, costs: RoundCosts | None) -> None:
        """What a step did. `costs` are None unless it was made of rounds alone."""
        for row in report.rows:
            if row.error is None and row.drafted and not (row.predicted or row.forced):
                self._survival.add(row.drafted, row.accepted)
        if not plan.verify:
            return
        depth = max(item.depth for item in plan.verify)
        catches_up, self._was_plain = bool(depth) and self._was_plain, not depth
        if costs is None or catches_up:
            return
        self._times.observe(
            batch=len(plan.verify),
            depth=depth,
            drafts=sum(item.depth for item in plan.verify),
            forward_ms=costs.main + costs.verify,
            total_ms=costs.total,
        )

    # ---- what to measure

    def _inputs(self, drafters: Sequence[Drafter], limits: Sequence[int]) -> DepthInputs:
        batch, limit = len(drafters), max(limits)
        state = self._octaves.setdefault(octave(batch), _Octave())
        group = self._survival.rates(self.max_depth)
        rates = [one.survival.rates(depth, group, GROUP_WEIGHT) for one, depth in zip(drafters, limits, strict=True)]
        inputs = DepthInputs(
            survivals=tuple(survivals(one) for one in rates),
            times=self._times.curve(batch, limit),
            current=state.current,
        )
        forced = self._unmeasured(inputs)
        if forced is None:
            forced = self._probe(state, inputs)
        return replace(inputs, forced=None if forced is None else min(forced, limit))

    def _unmeasured(self, inputs: DepthInputs) -> int | None:
        """The shallowest depth that nobody has measured, while going deeper still promises something."""
        best = 0.0
        for depth, time in enumerate(inputs.times):
            if time is None:
                return depth
            rate = option(inputs, depth).rate
            if rate < STOP_SLACK * best:
                return None
            best = max(best, rate)
        return None

    def _probe(self, state: _Octave, inputs: DepthInputs) -> int | None:
        """A neighbour of the depth in use, now and then: what is lost by looking is rationed."""
        if state.probe_left:
            state.probe_left -= 1
            return state.probe
        current = min(state.current, len(inputs.times) - 1)
        time = inputs.times[current]
        if time is None:
            return None
        state.since_probe += 1
        state.allowance_ms += PROBE_SHARE * time.full_ms
        neighbours = [depth for depth in (current + 1, current - 1) if 0 <= depth < len(inputs.times)]
        if state.since_probe < PROBE_GAP or not neighbours:
            return None
        probe = neighbours[-1] if neighbours[0] == state.probe else neighbours[0]
        lost_ms = PROBE_STEPS * _lost_ms(inputs, probe, current)
        if lost_ms > state.allowance_ms:
            return None
        state.allowance_ms = min(state.allowance_ms - lost_ms, lost_ms)
        state.since_probe, state.probe, state.probe_left = 0, probe, PROBE_STEPS - 1
        return probe


def _lost_ms(inputs: DepthInputs, probe: int, current: int) -> float:
    """What one step at the probed depth costs beyond making the same tokens at the current one."""
    here, there = inputs.times[current], inputs.times[probe]
    assert here is not None
    if there is None:
        return here.full_ms  # unknown: as if nothing came of it
    tokens = inputs.batch + sum(sum(one[:probe]) for one in inputs.survivals)
    return max(0.0, there.full_ms - tokens / option(inputs, current).rate)


def _plain(drafters: Sequence[Drafter], reason: str) -> DepthChoice:
    return DepthChoice(depths=(0,) * len(drafters), reason=reason)
