"""What a step of nothing but rounds takes, by batch and depth: medians of measured steps, nothing assumed.

    step_ms(batch, depth, drafts) = (batch + ratio) * median(step_ms / (batch + ratio)) - draft_ms * masked
    masked = batch * depth - drafts

Steps of batches within a factor of two share their medians, scaled to the batch at hand by a line through the measured
steps (`ratio` is its intercept over its slope). `draft_ms`, what a row under verification adds to the target's pass, is
the measured difference of C_verify and C_main; it prices requests whose drafts are masked out.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from statistics import StatisticsError, linear_regression, median

WINDOW = 32  # latest steps of a depth, whose median is its typical time
MAX_AGE = 512  # steps; older ones count only where there are too few young ones
MEASURE_STEPS = 3  # steps that make a depth known
FIRST_RATIO = 8.0  # before batches of several sizes were seen
LAST_RATIO = 1000.0  # the line is flat
REFIT_EVERY = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A step at one depth, milliseconds: when no request's drafts are masked, and what each masked one saves."""

    full_ms: float
    draft_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class _Sample:
    at: int  # number of steps observed before
    batch: int
    forward_ms: float
    total_ms: float


_total_ms = attrgetter("total_ms")
_forward_ms = attrgetter("forward_ms")


@dataclass(slots=True)
class StepTimes:
    """Deterministic: time is the number of steps observed."""

    _samples: defaultdict[tuple[int, int], deque[_Sample]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=WINDOW))
    )
    _num_observed: int = 0
    _ratio: float = FIRST_RATIO

    def observe(self, *, batch: int, depth: int, drafts: int, forward_ms: float, total_ms: float) -> None:
        """A step of `batch` rounds asked at `depth`, with `drafts` asked for in all. Masked drafts are priced in."""
        masked_ms = self._draft_ms(batch, depth) * (batch * depth - drafts)
        sample = _Sample(self._num_observed, batch, forward_ms + masked_ms, total_ms + masked_ms)
        self._samples[octave(batch), depth].append(sample)
        self._num_observed += 1
        if self._num_observed % REFIT_EVERY == 0:
            self._refit()

    def get(self, batch: int, depth: int) -> StepTime | None:
        """None until the depth was measured at a batch like this one."""
        if len(self._samples[octave(batch), depth]) < MEASURE_STEPS:
            return None
        return StepTime(full_ms=self._typical(batch, depth, _total_ms), draft_ms=self._draft_ms(batch, depth))

    def curve(self, batch: int, max_depth: int) -> tuple[StepTime | None, ...]:
        """Of depths 0 to `max_depth`. A deeper step does more, so where the medians say that it costs less, neighbours
        share their mean, weighted by samples.
        """
        found = [self.get(batch, depth) for depth in range(max_depth + 1)]
        known = [(depth, time) for depth, time in enumerate(found) if time is not None]
        num_samples = [len(self._samples[octave(batch), depth]) for depth, _ in known]
        full_ms = never_falling([time.full_ms for _, time in known], num_samples)
        for (depth, time), ms in zip(known, full_ms, strict=True):
            found[depth] = replace(time, full_ms=ms)
        return tuple(found)

    def _typical(self, batch: int, depth: int, time_ms: Callable[[_Sample], float]) -> float:
        samples = self._samples[octave(batch), depth]
        young = [one for one in samples if self._num_observed - one.at <= MAX_AGE]
        chosen = young if len(young) >= MEASURE_STEPS else samples
        return (batch + self._ratio) * median(time_ms(one) / (one.batch + self._ratio) for one in chosen)

    def _draft_ms(self, batch: int, depth: int) -> float:
        if not depth or not (self._samples[octave(batch), 0] and self._samples[octave(batch), depth]):
            return 0.0
        more = self._typical(batch, depth, _forward_ms) - self._typical(batch, 0, _forward_ms)
        return max(0.0, more / (batch * depth))

    def _refit(self) -> None:
        """The line of step time over batch, from the depth that has been seen at most batch sizes."""
        by_depth: defaultdict[int, list[_Sample]] = defaultdict(list)
        for (_, depth), found in self._samples.items():
            by_depth[depth] += found
        samples = max(by_depth.values(), key=lambda some: len({one.batch for one in some}))
        if len({one.batch for one in samples}) < 3:
            return
        try:
            slope, intercept = linear_regression([one.batch for one in samples], [one.total_ms for one in samples])
        except StatisticsError:
            return
        self._ratio = LAST_RATIO if slope <= 0 else min(LAST_RATIO, max(0.0, intercept / slope))


def never_falling(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The never-falling numbers nearest to `values` by weighted squares: neighbours that fall share their mean."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values, weights, strict=True):
        block = (value, float(weight), 1)
        while blocks and blocks[-1][0] > block[0]:
            before = blocks.pop()
            both = before[1] + block[1]
            block = ((before[0] * before[1] + block[0] * block[1]) / both, both, before[2] + block[2])
        blocks.append(block)
    return [mean for mean, _, count in blocks for _ in range(count)]


def octave(batch: int) -> int:
    """Batches within a factor of two: 1, 2 to 3, 4 to 7, …"""
    return batch.bit_length()
