"""How a quantity is spread, as counts that only rise: what Prometheus calls a histogram, with no library."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Spread:
    """Counts values at or below each bound, with their sum."""

    def __init__(self, bounds: Sequence[float] = STEP_S) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def counters(self, name: str) -> dict[str, float]:
        """`NAME.leB` for each bound B (cumulative), `NAME.sum` and `NAME.count`; nothing before the first value."""
        if not any(self._counts):
            return {}
        found: dict[str, float] = {}
        total = 0
        for bound, number in zip(self._bounds, self._counts, strict=False):
            total += number
            found[f"{name}.le{bound:g}"] = float(total)
        return {**found, f"{name}.sum": self._sum, f"{name}.count": float(total + self._counts[-1])}
