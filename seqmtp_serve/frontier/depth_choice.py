"""How deep each request drafts in the next round, and why: one pure function of what was measured.

    rate(D) = sum of worth * (1 + the chosen drafts' survivals) / (step_ms(B, D, number of chosen drafts) + starts)

A step has one depth D, the longest chain in it, and each request its own below that (a mask). At each D a request takes
the drafts that are worth more than their time would otherwise bring, and none if together they do not bring in what
starting costs; the D of the best rate wins. How many copied drafts a round has is decided when they are known
(`num_copies`).

What is not known well is given credit: `hopes` are survivals as they may turn out to be, `unsure_ms` is what a depth
may cost less than is thought. A choice that only credit explains is a look. Credit grows with doubt and with what is
still to come, so what being wrong would cost decides how often one is taken. Every decision carries what it was made
from, so that it can be made again offline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from math import prod
from typing import Any

from seqmtp_serve.frontier.step_times import StepTime
from seqmtp_serve.frontier.survival import LEFT_OUT

Table = tuple[tuple[float, ...], ...]

COST_CREDIT = 0.5  # of the standard deviation of a depth's time
LOOKING = 0.1  # of a batch, at most: what they find out is known of the others too
MOST_TURNS = 8  # two or three are usual
GOES_ON = 0.6  # of chains whose drafts so far are accepted: about how often one draft more is
LEAST_FLOOR = 1e-3  # so that proposers say their chances
FEWEST = 0.1  # of a step is left, whatever masks and credit take off it


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthInputs:
    """`survivals[i][j]`: probability that request i's drafts up to j are all accepted; as long as its limit.

    `made` and `rows` have its shape, where chains end at a floor: the probability that draft j, if it is asked for, is
    made, and how much of a verified draft's time it takes; empty: all are made and verified.

    `hopes` has their shape; empty: the survivals are all there is to hope for. `starts[i]`: milliseconds that a round
    takes more if request i drafts in it, for rows that the module is behind, spread over the rounds that are left;
    empty: none. `worths[i]`: of a token of request i, 1 in the mean; empty: all alike. `times[d]` is None where nothing
    is known of depth d. `current`: the depth in use, that `unsure_ms` is compared with.
    """

    survivals: Table
    times: tuple[StepTime | None, ...]
    hopes: Table = ()
    made: Table = ()
    rows: Table = ()
    starts: tuple[float, ...] = ()
    worths: tuple[float, ...] = ()
    current: int = 0

    @property
    def batch(self) -> int:
        return len(self.survivals)

    def to_json(self) -> dict[str, Any]:
        """For a ledger that is read elsewhere."""
        times = [None if one is None else [one.full_ms, one.draft_ms, one.unsure_ms] for one in self.times]
        return {
            "survivals": self.survivals,
            "hopes": self.hopes,
            "made": self.made,
            "rows": self.rows,
            "starts": self.starts,
            "worths": self.worths,
            "times": times,
            "current": self.current,
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> DepthInputs:
        """Inverse of `to_json`. Of an entry that an older version kept, what it has."""
        names = ("full_ms", "draft_ms", "unsure_ms")
        times = [None if one is None else StepTime(**dict(zip(names, one, strict=False))) for one in entry["times"]]
        return cls(
            survivals=_table(entry["survivals"]),
            hopes=_table(entry.get("hopes", ())),
            made=_table(entry.get("made", ())),
            rows=_table(entry.get("rows", ())),
            starts=tuple(entry.get("starts", ())),
            worths=tuple(entry.get("worths", ())),
            times=tuple(times),
            current=entry["current"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthChoice:
    """`depths` in the order of the requests. `fallback`: the measurements say that drafts do not pay.

    `row_price`: tokens that the time of one more verified draft would otherwise bring; `pass_price`: likewise of a
    request's part in one more pass of the module. `inputs` None: nothing was weighed (a fixed depth, no proposer).
    """

    depths: tuple[int, ...]
    reason: str
    depth: int = 0  # of the step
    fallback: bool = False
    row_price: float = 0.0
    pass_price: float = 0.0
    inputs: DepthInputs | None = None

    def to_json(self) -> dict[str, Any]:
        """An entry of a depth ledger; `replay` takes those that have inputs."""
        inputs = None if self.inputs is None else self.inputs.to_json()
        return {
            "inputs": inputs,
            "depths": self.depths,
            "row_price": self.row_price,
            "pass_price": self.pass_price,
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> DepthChoice:
        """Inverse of `to_json`, as far as an entry goes."""
        inputs = None if entry["inputs"] is None else DepthInputs.from_json(entry["inputs"])
        return cls(
            depths=tuple(entry["depths"]),
            reason=entry["reason"],
            row_price=entry.get("row_price", 0.0),
            pass_price=entry.get("pass_price", 0.0),
            inputs=inputs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The best that can be had at one depth: `rate` as expected, `hope` with credit, in tokens a millisecond."""

    depths: tuple[int, ...]
    rate: float
    hope: float


def decide(inputs: DepthInputs) -> DepthChoice:
    """The depths of the next round."""
    options: dict[int, Option] = {}
    for depth, time in enumerate(inputs.times):
        if time is not None:
            options[depth] = option(inputs, depth, max((one.hope for one in options.values()), default=0.0))
    if not options:
        return DepthChoice(depths=(0,) * inputs.batch, reason="plain: no step was measured yet", inputs=inputs)
    best = max(options, key=lambda depth: options[depth].hope)
    depths = options[best].depths
    return DepthChoice(
        depths=depths,
        depth=max(depths),
        reason=_reason(inputs, options, best),
        fallback=not any(depths),
        row_price=round(max(0.0 if one is None else one.draft_ms for one in inputs.times) * options[best].rate, 4),
        pass_price=round(max(_passes_ms(inputs), default=0.0) * options[best].rate / inputs.batch, 4),
        inputs=inputs,
    )


def num_copies(choice: DepthChoice | None, place: int, survivals: Sequence[float]) -> int:
    """How many copied drafts, accepted so often, are worth their rows in the step that `choice` decided.

    They take no pass of the module, so a row each is all they cost. Without a choice that weighed anything: all.
    """
    if choice is None or choice.inputs is None:
        return len(survivals)
    worth = choice.inputs.worths[place] if choice.inputs.worths else 1.0
    return sum(1 for _ in takewhile(lambda survival: worth * survival > choice.row_price, survivals))


def floors(choice: DepthChoice | None, place: int) -> tuple[float, float]:
    """Below which chance of a draft it is not worth its row, and below which none is worth drafting behind it.

    (0, 0) without a choice that weighed anything: fixed depths are kept.
    """
    if choice is None or choice.inputs is None:
        return 0.0, 0.0
    worth = choice.inputs.worths[place] if choice.inputs.worths else 1.0
    keep = (1.0 - LEFT_OUT) * choice.row_price / worth
    goes_on = (choice.row_price + choice.pass_price) / worth / GOES_ON
    return max(LEAST_FLOOR, round(keep, 4)), max(LEAST_FLOOR, round(goes_on, 4))


def option(inputs: DepthInputs, depth: int, other: float = 0.0) -> Option:
    """Which drafts to take at a depth that something is known of. Where `other` is a better rate: about which."""
    time, batch = inputs.times[depth], inputs.batch
    assert time is not None
    hopes = inputs.hopes or inputs.survivals
    starts = inputs.starts or (0.0,) * batch
    worths = inputs.worths or (1.0,) * batch
    rows = inputs.rows or tuple((1.0,) * len(one) for one in inputs.survivals)
    num_drafts, credit_ms = batch * depth, COST_CREDIT * time.unsure_ms
    draft_ms = max(FEWEST * time.draft_ms, time.draft_ms - credit_ms / max(1, num_drafts))  # with credit, as `bare_ms`
    spared_ms = _spared_ms(inputs, depth)
    bare_ms = max(FEWEST * time.full_ms, time.full_ms - credit_ms - draft_ms * num_drafts - spared_ms)
    chosen, step_ms, hope, started_ms = [0] * batch, bare_ms, sum(worths), 0.0
    price = max(other, hope / bare_ms)
    for _ in range(MOST_TURNS if depth else 0):  # Dinkelbach: each turn raises the price of a millisecond to what it is
        started_ms, hope, draft_price = 0.0, 0.0, draft_ms * price
        for index, (survivals, own, start_ms, worth) in enumerate(zip(hopes, rows, starts, worths, strict=True)):
            taken, tokens, earned = 0, 1.0, -start_ms * price
            for survival, row in zip(survivals[:depth], own, strict=False):
                gain = worth * survival - row * draft_price
                if gain <= 0.0:
                    break
                taken, tokens, earned = taken + 1, tokens + survival, earned + gain
            if earned <= 0.0:
                taken, tokens = 0, 1.0
            elif taken:
                started_ms += start_ms
            chosen[index] = taken
            hope += worth * tokens
        step_ms = bare_ms + started_ms + _num_rows(rows, chosen) * draft_ms
        if hope <= price * step_ms:
            break
        price = hope / step_ms
    looks = [
        index
        for index, (survivals, own, start_ms, worth) in enumerate(
            zip(inputs.survivals, rows, starts, worths, strict=True)
        )
        if chosen[index] and worth * survivals[0] <= (own[0] * time.draft_ms + start_ms) * price
    ]
    if len(looks) > (most := max(1, round(LOOKING * batch))):
        for index in sorted(looks, key=lambda index: -hopes[index][0])[most:]:
            hope -= worths[index] * sum(hopes[index][: chosen[index]])
            step_ms -= starts[index] + sum(rows[index][: chosen[index]]) * draft_ms
            started_ms -= starts[index]
            chosen[index] = 0
    masked = num_drafts - _num_rows(rows, chosen)
    expected = sum(
        worth * (1.0 + sum(one[:taken])) for one, worth, taken in zip(inputs.survivals, worths, chosen, strict=True)
    )
    expected_ms = max(FEWEST * time.full_ms, time.full_ms + started_ms - time.draft_ms * masked - spared_ms)
    return Option(depths=tuple(chosen), rate=expected / expected_ms, hope=hope / step_ms)


def _passes_ms(inputs: DepthInputs) -> list[float]:
    """What the module's pass for each position of a chain takes, its rows aside; of those that are known."""
    bare = [
        None if one is None else one.full_ms - inputs.batch * depth * one.draft_ms
        for depth, one in enumerate(inputs.times)
    ]
    return [0.0 if one is None or before is None else max(0.0, one - before) for before, one in pairwise(bare)][1:]


def _spared_ms(inputs: DepthInputs, depth: int) -> float:
    """Of the passes of a step so deep: those that nobody's chain goes on to."""
    if not inputs.made:
        return 0.0
    spared_ms = 0.0
    for position, pass_ms in enumerate(_passes_ms(inputs)[: max(0, depth - 1)], 1):
        spared_ms += pass_ms * prod(1.0 - one[position] for one in inputs.made if position < len(one))
    return spared_ms


def _num_rows(rows: Table, chosen: Sequence[int]) -> float:
    return sum(sum(one[:taken]) for one, taken in zip(rows, chosen, strict=True))


def _reason(inputs: DepthInputs, options: Mapping[int, Option], best: int) -> str:
    times = {depth: f"{one.rate / options[0].rate:.2f} times plain decoding" for depth, one in options.items()}
    depth, at = max(options[best].depths), f"at batch {inputs.batch}"
    if not depth:
        others = [other for other in options if other]
        if not others:
            return f"plain: no step without drafts was seen {at} yet"
        runner_up = max(others, key=lambda other: options[other].rate)
        return f"plain: depth {runner_up} promises {times[runner_up]} {at}"
    if options[best].rate < max(one.rate for one in options.values()):
        return f"depth {depth}: a look, {times[best]} {at} without luck"
    return f"depth {depth}: {times[best]} {at}"


def _table(rows: Sequence[Sequence[float]]) -> Table:
    return tuple(tuple(one) for one in rows)


def replay(entries: Sequence[Mapping[str, Any]]) -> list[int]:
    """Decide each entry of a depth ledger again; the indices of those that come out differently."""
    return [
        index
        for index, entry in enumerate(entries)
        if list(decide(DepthInputs.from_json(entry["inputs"])).depths) != list(entry["depths"])
    ]
