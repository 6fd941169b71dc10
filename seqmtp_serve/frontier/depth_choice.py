"""How deep each request drafts in the next round, and why: one pure function of what was measured.

    rate(D) = (B + sum of the chosen drafts' survivals) / step_ms(B, D, number of chosen drafts)

A step has one depth D, the longest chain in it, and each request its own below that (a mask). For each D the drafts
are taken in the order of their survival as long as that raises the rate; the D of the best rate wins, if it beats the
one in use by more than the hysteresis. Every decision carries what it was made from, so that it can be made again
offline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from seqmtp_serve.frontier.step_times import StepTime

HYSTERESIS = 0.01  # a depth in use is left for one that promises this much more


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthInputs:
    """`survivals[i][j]`: probability that request i's drafts up to j are all accepted; as long as its limit.

    `times[d]` is None where depth d has not been measured. `forced`: this step measures a depth, whatever it costs.
    """

    survivals: tuple[tuple[float, ...], ...]
    times: tuple[StepTime | None, ...]
    current: int = 0
    forced: int | None = None

    @property
    def batch(self) -> int:
        return len(self.survivals)

    def to_json(self) -> dict[str, Any]:
        """For a ledger that is read elsewhere."""
        times = [None if one is None else [one.full_ms, one.draft_ms] for one in self.times]
        return {"survivals": self.survivals, "times": times, "current": self.current, "forced": self.forced}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> DepthInputs:
        """Inverse of `to_json`."""
        times = [None if one is None else StepTime(full_ms=one[0], draft_ms=one[1]) for one in entry["times"]]
        survivals = tuple(tuple(one) for one in entry["survivals"])
        return cls(survivals=survivals, times=tuple(times), current=entry["current"], forced=entry["forced"])


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthChoice:
    """`depths` in the order of the requests. `fallback`: the measurements say that drafts do not pay.

    `inputs` None: nothing was weighed (a fixed depth, no proposer).
    """

    depths: tuple[int, ...]
    reason: str
    depth: int = 0  # of the step
    fallback: bool = False
    inputs: DepthInputs | None = None

    def to_json(self) -> dict[str, Any]:
        """An entry of a depth ledger; `replay` takes those that have inputs."""
        inputs = None if self.inputs is None else self.inputs.to_json()
        return {"inputs": inputs, "depths": self.depths, "reason": self.reason}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> DepthChoice:
        """Inverse of `to_json`, as far as an entry goes."""
        inputs = None if entry["inputs"] is None else DepthInputs.from_json(entry["inputs"])
        return cls(depths=tuple(entry["depths"]), reason=entry["reason"], inputs=inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The best that can be had at one depth."""

    rate: float  # tokens a millisecond
    depths: tuple[int, ...]


def decide(inputs: DepthInputs) -> DepthChoice:
    """The depths of the next round."""
    if inputs.forced is not None:
        depths = tuple(min(inputs.forced, len(one)) for one in inputs.survivals)
        reason = f"measuring depth {inputs.forced} at batch {inputs.batch}"
        return DepthChoice(depths=depths, depth=inputs.forced, reason=reason, inputs=inputs)
    options = {depth: option(inputs, depth) for depth, time in enumerate(inputs.times) if time is not None}
    best = max(options, key=lambda depth: options[depth].rate)
    current = inputs.current
    if current in options and options[best].rate <= options[current].rate * (1 + HYSTERESIS):
        best = current
    return DepthChoice(
        depths=options[best].depths,
        depth=best,
        reason=_reason(inputs, options, best),
        fallback=best == 0,
        inputs=inputs,
    )


def option(inputs: DepthInputs, depth: int) -> Option:
    """Which drafts to take at a depth that has been measured."""
    time, batch = inputs.times[depth], inputs.batch
    assert time is not None
    drafts = sorted(
        (-survival, position, index)
        for index, one in enumerate(inputs.survivals)
        for position, survival in enumerate(one[:depth])
    )
    if not drafts:
        return Option(rate=batch / time.full_ms, depths=(0,) * batch)
    tokens = list(accumulate((-survival for survival, _, _ in drafts), initial=float(batch)))
    rates = [tokens[count] / _step_ms(time, batch * depth - count) for count in range(1, len(drafts) + 1)]
    count = max(range(len(rates)), key=rates.__getitem__)
    depths = [0] * batch
    for _, position, index in drafts[: count + 1]:
        depths[index] = position + 1
    return Option(rate=rates[count], depths=tuple(depths))


def _step_ms(time: StepTime, masked: int) -> float:
    return max(time.full_ms - time.draft_ms * masked, 0.1 * time.full_ms)


def _reason(inputs: DepthInputs, options: Mapping[int, Option], best: int) -> str:
    others = [depth for depth in options if depth != best]
    if 0 not in options or not others:
        return f"depth {best}: the only one measured at batch {inputs.batch}"
    if best:
        gain = options[best].rate / options[0].rate
        return f"depth {best}: {gain:.2f} times plain decoding at batch {inputs.batch}"
    runner_up = max(others, key=lambda depth: options[depth].rate)
    gain = options[runner_up].rate / options[0].rate
    return f"plain: depth {runner_up} promises {gain:.2f} times plain decoding at batch {inputs.batch}"


def replay(entries: Sequence[Mapping[str, Any]]) -> list[int]:
    """Decide each entry of a depth ledger again; the indices of those that come out differently."""
    return [
        index
        for index, entry in enumerate(entries)
        if list(decide(DepthInputs.from_json(entry["inputs"])).depths) != list(entry["depths"])
    ]
