"""The depth controller: what is known of requests and steps, and the ledger of decisions. The text never depends on it.

The depth of a round is chosen one step before it runs, because drafts are made while the step before is committed: it
goes to the target as a hint, and the proposer drafts no more than will be verified.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from seqmtp_serve.frontier.depth_choice import DepthChoice, DepthInputs, decide
from seqmtp_serve.frontier.ledger import RoundCosts
from seqmtp_serve.frontier.step_times import StepTime, StepTimes, octave
from seqmtp_serve.frontier.survival import Survival, num_rows
from seqmtp_serve.ports import RowResult, StepPlan, StepReport

GROUP_MEMORY = 256.0  # rounds
GROUP_FADE = 1 / 16  # of what is known of a group goes with each request that joins it
FORESIGHT = 256  # tokens; a budget of more says nothing of how long a text will be
TOKENS_A_ROUND = 1.5
LAST_ONES = 4.0  # how sharply the last requests to end are told from those that end before them
LEDGER_LEN = 1024
MOST_PLAIN = 4  # rounds that wait to see a plain step of a new size of batch: one with prompts in it tells nothing

Policy = Literal["static", "auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """A request of the next round: the drafts it can use at most, and what became of its drafts so far.

    At most `num_left` tokens are still to come. The module has to compute `behind` rows before it can draft.
    """

    limit: int
    survival: Survival
    num_left: int
    behind: int = 0
    temperature: float = 0.0

    @property
    def group(self) -> int:
        """Of requests that are drawn about alike, whose drafts fare alike."""
        return round(2 * self.temperature)

    @property
    def rounds_left(self) -> float:
        return max(1.0, min(self.num_left, FORESIGHT) / TOKENS_A_ROUND)


@dataclass(slots=True)
class DepthController:
    """`static`: as deep as allowed. `auto`: what pays by `depth_choice.py`, from what was seen of steps and drafts.

    Deterministic and without a clock: the same observations and questions give the same decisions.
    """

    policy: Policy
    max_depth: int
    ledger: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=LEDGER_LEN))
    _times: StepTimes = field(default_factory=StepTimes)
    _groups: dict[int, Survival] = field(default_factory=dict)
    _current: dict[int, int] = field(default_factory=dict)  # the depth in use, by octave of the batch
    _plain_asked: Counter[int] = field(default_factory=Counter)  # rounds chosen plain to see one, by octave

    def choose(self, drafters: Sequence[Drafter], *, proposer_ready: bool, others_wait: bool = False) -> DepthChoice:
        """The depths of the next round of these requests. `others_wait`: whoever ends makes room for another.

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
        choice = decide(self._inputs(drafters, limits, others_wait))
        self._current[octave(len(drafters))] = choice.depth
        self.ledger.append(choice.to_json())
        return choice

    def observe(self, plan: StepPlan, report: StepReport, costs: RoundCosts | None, *, behind: int = 0) -> None:
        """What a step took, that caught up on `behind` rows. `costs` are None unless it was made of rounds alone."""
        if costs is None or not plan.verify:
            return
        results = {row.ref.request_id: row for row in report.rows}
        work = [_work(item.depth, results.get(item.ref.request_id)) for item in plan.verify]
        self._times.observe(
            batch=len(plan.verify),
            depth=max(made for made, _ in work),
            drafts=sum(rows for _, rows in work),
            behind=behind,
            ms=costs.total - report.costs.select,
        )

    def _inputs(self, drafters: Sequence[Drafter], limits: Sequence[int], others_wait: bool) -> DepthInputs:
        batch, limit = len(drafters), max(limits)
        for one in drafters:
            if one.survival.group is None:
                one.survival.group = self._group(one.group)
                one.survival.group.fade(GROUP_FADE)
        outlooks = [one.survival.outlook(depth, one.rounds_left) for one, depth in zip(drafters, limits, strict=True)]
        expected, hopes, made, rows = zip(*outlooks, strict=True)
        behind_ms, shared = self._times.behind_ms(batch), self._times.shared_part(batch)
        current = self._current.get(octave(batch), 0)
        return DepthInputs(
            survivals=expected,
            hopes=hopes,
            made=made,
            rows=rows,
            starts=_rounded([behind_ms * one.behind / one.rounds_left for one in drafters]),
            worths=() if others_wait else _rounded(_worths(drafters, expected, shared)),
            times=self._curve(batch, limit, current),
            current=current,
        )

    def _curve(self, batch: int, limit: int, current: int) -> tuple[StepTime | None, ...]:
        """Nothing is known of a new size of batch before a plain step of it was seen, so it begins with one."""
        curve, size = self._times.curve(batch, limit, current), octave(batch)
        if not curve or self._times.has_plain(batch) or self._plain_asked[size] >= MOST_PLAIN:
            return curve
        self._plain_asked[size] += 1
        return (curve[0], *[None] * limit)

    def _group(self, group: int) -> Survival:
        return self._groups.setdefault(group, Survival(GROUP_MEMORY))


def _work(asked: int, row: RowResult | None) -> tuple[int, float]:
    """Passes of the module that a round went through, and its drafts, in verified ones."""
    if row is not None and row.chances:
        return len(row.chances), num_rows(len(row.chances), row.drafted)
    return 0 if row is not None and row.copied else asked, asked


def _worths(drafters: Sequence[Drafter], expected: Sequence[Sequence[float]], shared: float) -> tuple[float, ...]:
    """What a token of each request is worth, 1 in the mean, when nobody takes the place of one that ends.

    `shared` of an ordinary step is paid until the last request ends, so the tokens of those that will be last save it;
    those of the others only save their own part of the steps. Who will be last is not sure, so it is shared out. Long
    budgets say nothing of it: then all are worth the same (empty).
    """
    if max(one.num_left for one in drafters) > FORESIGHT:
        return ()
    left = [one.num_left / (1.0 + sum(own[:1])) for one, own in zip(drafters, expected, strict=True)]
    longest = max(left)
    chances = [(one / longest) ** LAST_ONES for one in left]
    mean = sum(chances) / len(chances)
    return tuple(1.0 - shared + shared * chance / mean for chance in chances)


def _rounded(values: Sequence[float]) -> tuple[float, ...]:
    """Enough to decide by, and short in a ledger."""
    return tuple(round(value, 4) for value in values)


def _plain(drafters: Sequence[Drafter], reason: str) -> DepthChoice:
    return DepthChoice(depths=(0,) * len(drafters), reason=reason)
