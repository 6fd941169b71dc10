"""What a step of nothing but rounds takes: a line for each size of batch, learned from steps and slowly forgotten.

    step_ms = step + sequence * batch + (depth > 0) * drafting + depth * position + drafts * draft + behind * row

`drafts` are those asked of all requests together, `depth` is the longest chain of the module's (copies take none of its
passes), `behind` the rows that the module
computes before it can draft, because nobody wanted drafts when they were made. Each coefficient is an estimate with an
uncertainty (a Kalman filter): a measured step makes them sharper, time makes them vaguer, most of all their common
factor, for what changes first is the speed of the whole machine. So what has not been looked at for long says so.
What selection takes is no part of it: it goes with tokens, at any depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import copysign, sqrt
from statistics import median

# Of an ordinary step: what is taken for granted before anything is known, and how far that may be off.
FIRST_GUESS = (0.7, 0.3, 0.01, 0.03, 0.35, 0.003)
FIRST_DOUBT = (0.3, 0.3, 0.02, 0.03, 0.2, 0.006)
NEIGHBOUR_DOUBT = 0.3  # of a coefficient that was learned at another size of batch
SPEED_DRIFT = 0.004  # of the machine's speed, a step
DRIFT = 0.01  # of a coefficient by itself, a step, of its first doubt
LONGEST = 1024  # steps; what was not seen for longer is no vaguer
FIRST_STEPS = 3  # before there is any estimate: the first one may have been delayed
FIRST_NOISE = 0.1  # of a step's time
NOISE_MEMORY = 64.0  # steps
MOST_SHARED = 0.9  # of a step is ever taken for independent of the batch
DELAYED = 1.5  # standard deviations; a step that takes longer still was held up, as far as one knows
MEAN_OF_STANDARD = 0.8  # mean deviation over standard deviation
LEAST_NOISE = 0.01  # of a step's time

Vector = tuple[float, ...]
DRAFTS = 4  # their place among the features


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A step at one depth, milliseconds, when no request's drafts are masked; what each masked one saves; and how far
    its difference to a step of the depth in use may be off (a standard deviation).
    """

    full_ms: float
    draft_ms: float = 0.0
    unsure_ms: float = 0.0


@dataclass(slots=True)
class _Line:
    """Coefficients of batches of about one size."""

    mean: list[float]
    covariance: list[list[float]]
    limit: list[float]  # variances beyond which nothing is forgotten
    noise: float = FIRST_NOISE
    at: int = 0  # number of steps observed when it was last touched
    has_plain: bool = False  # a step without drafts was one of them

    def age(self, now: int) -> None:
        """Grow vaguer by the steps since."""
        steps, self.at = min(LONGEST, now - self.at), now
        if not steps:
            return
        speed = steps * SPEED_DRIFT**2 if self.covariance[0][0] < self.limit[0] else 0.0
        for row, limit, mean, place in zip(self.covariance, self.limit, self.mean, range(len(self.mean)), strict=True):
            if row[place] < limit:
                row[place] += steps * DRIFT**2 * limit
            for other, factor in enumerate(self.mean):
                row[other] += speed * mean * factor

    def learn(self, features: Vector, ms: float) -> None:
        """One step."""
        across = [_dot(row, features) for row in self.covariance]
        expected = _dot(self.mean, features)
        doubt, noise = _dot(across, features), (self.noise * expected) ** 2
        surprise = ms - expected
        usual = surprise if abs(surprise) < (bound := DELAYED * sqrt(doubt + noise)) else copysign(bound, surprise)
        if surprise > bound:
            noise = (surprise / DELAYED) ** 2 - doubt  # as noisy as that makes it: it says little, and settles little
        for place, gain in enumerate(across):
            share = gain / (doubt + noise)
            self.mean[place] = max(0.0, self.mean[place] + share * surprise)
            row = self.covariance[place]
            for other, factor in enumerate(across):
                row[other] -= share * factor
        self.noise += (abs(usual) / expected / MEAN_OF_STANDARD - self.noise) / NOISE_MEMORY
        self.noise = max(LEAST_NOISE, self.noise)

    def unsure_ms(self, drafting: int, depth: int, drafts: int) -> float:
        """Standard deviation of what so much more of these takes."""
        if not depth:
            return 0.0
        (_, _, aa, ab, ac, _), (_, _, _, bb, bc, _), (_, _, _, _, cc, _) = self.covariance[2:5]
        variance = drafting * drafting * aa + depth * depth * bb + drafts * drafts * cc
        variance += 2 * (drafting * depth * ab + drafting * drafts * ac + depth * drafts * bc)
        return sqrt(max(0.0, variance))


@dataclass(slots=True)
class StepTimes:
    """Deterministic: time is the number of steps observed."""

    _lines: dict[int, _Line] = field(default_factory=dict)
    _num_observed: int = 0
    _first: list[tuple[int, Vector, float]] = field(default_factory=list)  # until there are enough to begin with

    def observe(self, *, batch: int, depth: int, drafts: float, behind: int, ms: float) -> None:
        """A step of `batch` rounds asked at `depth`, of `drafts` asked for in all, that caught up on `behind` rows."""
        if ms <= 0.0:
            return
        self._first.append((batch, _features(batch, depth, drafts, behind), ms))
        if not self._lines and len(self._first) < FIRST_STEPS:
            return
        if not self._lines:
            ordinary_ms = median(ms / _dot(FIRST_GUESS, _shape(batch, features)) for batch, features, ms in self._first)
            self._lines[octave(batch)] = _first_line(batch, ordinary_ms)
        for size, features, each_ms in self._first:
            self._num_observed += 1
            line = self._line(size)
            line.age(self._num_observed)
            line.learn(features, each_ms)
            line.has_plain |= not features[DRAFTS]
        self._first.clear()

    def curve(self, batch: int, max_depth: int, current: int) -> tuple[StepTime, ...]:
        """Of depths 0 to `max_depth`; empty before any step was measured. `current`: the depth in use."""
        if not self._lines:
            return ()
        line = self._line(batch)
        line.age(self._num_observed)
        step, sequence, drafting, position, draft, _ = line.mean
        here, plain_ms = min(current, max_depth), step + batch * sequence
        return tuple(
            StepTime(
                full_ms=plain_ms + (drafting if depth else 0.0) + depth * (position + batch * draft),
                draft_ms=draft if depth else 0.0,
                unsure_ms=line.unsure_ms((depth > 0) - (here > 0), depth - here, batch * (depth - here)),
            )
            for depth in range(max_depth + 1)
        )

    def has_plain(self, batch: int) -> bool:
        """Whether a step without drafts was seen of batches like this one."""
        size = octave(batch)
        return size in self._lines and self._lines[size].has_plain

    def behind_ms(self, batch: int) -> float:
        """What each row takes that the module has to catch up on."""
        return self._line(batch).mean[5] if self._lines else 0.0

    def shared_part(self, batch: int) -> float:
        """The part of an ordinary step that it takes for any number of requests."""
        if not self._lines:
            return 0.0
        step, sequence = self._line(batch).mean[:2]
        return min(MOST_SHARED, step / (step + batch * sequence))

    def _line(self, batch: int) -> _Line:
        """Of batches like this one; at first what the nearest other size has taught."""
        size = octave(batch)
        if size not in self._lines:
            near = min(self._lines, key=lambda other: abs(other - size))
            self._lines[size] = _like(self._lines[near], batch)
            self._lines[size].at = self._num_observed
        return self._lines[size]


def _first_line(batch: int, ordinary_ms: float) -> _Line:
    unit = _units(batch, ordinary_ms)
    doubt = [a * b for a, b in zip(FIRST_DOUBT, unit, strict=True)]
    mean = [a * b for a, b in zip(FIRST_GUESS, unit, strict=True)]
    return _Line(mean=mean, covariance=_diagonal([one**2 for one in doubt]), limit=[one**2 for one in doubt])


def _like(line: _Line, batch: int) -> _Line:
    """What another size of batch has taught, with doubts."""
    ordinary_ms = line.mean[0] + batch * line.mean[1]
    unit = _units(batch, ordinary_ms)
    limit = [(a * b) ** 2 for a, b in zip(FIRST_DOUBT, unit, strict=True)]
    doubt = [max((NEIGHBOUR_DOUBT * mean) ** 2, 0.05 * most) for mean, most in zip(line.mean, limit, strict=True)]
    return _Line(mean=list(line.mean), covariance=_diagonal(doubt), limit=limit, noise=line.noise)


def _units(batch: int, ordinary_ms: float) -> Vector:
    """What the coefficients are fractions of: an ordinary step, or its share of a request."""
    share = ordinary_ms / batch
    return (ordinary_ms, share, ordinary_ms, ordinary_ms, share, share)


def _shape(batch: int, features: Vector) -> Vector:
    return tuple(a * b for a, b in zip(features, _units(batch, 1.0), strict=True))


def _features(batch: int, depth: int, drafts: float, behind: int) -> Vector:
    return (1.0, float(batch), float(depth > 0), float(depth), float(drafts), float(behind))


def _diagonal(values: Sequence[float]) -> list[list[float]]:
    return [[value if i == j else 0.0 for j in range(len(values))] for i, value in enumerate(values)]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def octave(batch: int) -> int:
    """Batches within a factor of two: 1, 2 to 3, 4 to 7, …"""
    return batch.bit_length()
