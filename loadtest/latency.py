"""A latency distribution that adds up across processes: exact count, sum and square sum, percentiles within 0.5 %."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, log, sqrt
from typing import Any

_GROWTH = 1.01
_FLOOR_MS = 1e-3


@dataclass(slots=True)
class Latency:
    """Milliseconds in buckets that each are 1 % wider than the last."""

    count: int = 0
    total: float = 0.0
    square_total: float = 0.0
    buckets: dict[int, int] = field(default_factory=dict)

    def add(self, value_ms: float) -> None:
        """Count one value."""
        self.count += 1
        self.total += value_ms
        self.square_total += value_ms * value_ms
        index = ceil(log(max(value_ms, _FLOOR_MS) / _FLOOR_MS, _GROWTH))
        self.buckets[index] = self.buckets.get(index, 0) + 1

    def merge(self, other: Latency) -> None:
        """Count everything `other` counted."""
        self.count += other.count
        self.total += other.total
        self.square_total += other.square_total
        for index, number in other.buckets.items():
            self.buckets[index] = self.buckets.get(index, 0) + number

    @property
    def mean(self) -> float:
        """Arithmetic mean; 0 when empty."""
        return self.total / self.count if self.count else 0.0

    @property
    def std(self) -> float:
        """Population standard deviation; 0 when empty."""
        return sqrt(max(self.square_total / self.count - self.mean**2, 0.0)) if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """The value that `percent` of 100 lie at or below: the middle of its bucket; 0 when empty."""
        wanted, seen = self.count * percent / 100.0, 0
        for index in sorted(self.buckets):
            seen += self.buckets[index]
            if seen >= wanted:
                return float(_FLOOR_MS * _GROWTH ** (index - 0.5))
        return 0.0

    def to_message(self) -> dict[str, object]:
        """Plain values for the wire (string keys only)."""
        return {
            "count": self.count,
            "total": self.total,
            "square_total": self.square_total,
            "buckets": [list(item) for item in self.buckets.items()],
        }

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Latency:
        """The inverse of `to_message`."""
        return cls(
            count=message["count"],
            total=message["total"],
            square_total=message["square_total"],
            buckets={int(index): int(number) for index, number in message["buckets"]},
        )
