"""Everything a run counts, as sums: workers send theirs to the master, which adds them up.

Locust itself sums only rounded response times across workers, which is too little for E[R], TPS and goodput.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from loadtest.answer import Answer
from loadtest.latency import Latency
from loadtest.recovery import Sendings
from loadtest.slo import Objectives
from loadtest.speculation import Speculation
from loadtest.timeline import Timeline

LATENCIES = ("ttft", "tpot", "icl", "e2el", "lag")


@dataclass(slots=True)
class Totals:
    """Sums over answers. `started` and `ended` are Unix times of the first request sent and the last answer's end."""

    num_failed: int = 0
    num_good: int = 0
    num_prompt_tokens: int = 0
    started: float = float("inf")
    ended: float = 0.0
    latencies: dict[str, Latency] = field(default_factory=lambda: {name: Latency() for name in LATENCIES})
    by_category: dict[str, Speculation] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline)
    sendings: Sendings = field(default_factory=Sendings)

    def add(self, answer: Answer, category: str, started: float, ended: float, objectives: Objectives) -> None:
        """Count one whole answer."""
        self._span(started, ended)
        is_good = objectives.are_met(answer)
        self.num_good += is_good
        self.timeline.at(ended).add(answer, is_good)
        self.sendings.at(started).add(answer, is_good, started)
        self.num_prompt_tokens += int((answer.usage or {}).get("prompt_tokens", 0))
        values = {"ttft": answer.ttft_ms, "tpot": answer.tpot_ms, "e2el": answer.e2e_ms}
        for name, value in values.items():
            if value is not None:
                self.latencies[name].add(value)
        for gap in answer.icl_ms:
            self.latencies["icl"].add(gap)
        self.by_category.setdefault(category, Speculation()).add(answer)

    def add_failure(self, started: float, ended: float) -> None:
        """Count a request that gave no whole answer."""
        self._span(started, ended)
        self.num_failed += 1
        self.timeline.at(ended).num_failed += 1
        self.sendings.at(started).add_failure(ended)

    def add_lag(self, lag_ms: float) -> None:
        """Count how late a scheduled request was sent."""
        self.latencies["lag"].add(lag_ms)

    def merge(self, other: Totals) -> None:
        """Count everything `other` counted."""
        self._span(other.started, other.ended)
        self.num_failed += other.num_failed
        self.num_good += other.num_good
        self.num_prompt_tokens += other.num_prompt_tokens
        for name, latency in other.latencies.items():
            self.latencies[name].merge(latency)
        self.timeline.merge(other.timeline)
        self.sendings.merge(other.sendings)
        for category, speculation in other.by_category.items():
            self.by_category.setdefault(category, Speculation()).merge(speculation)

    def _span(self, started: float, ended: float) -> None:
        self.started, self.ended = min(self.started, started), max(self.ended, ended)

    @property
    def duration_s(self) -> float:
        """Seconds from the first request to the last answer's end."""
        return max(self.ended - self.started, 0.0)

    @property
    def overall(self) -> Speculation:
        """All categories together, pooled over rounds."""
        pooled = Speculation()
        for each in self.by_category.values():
            pooled.merge(each)
        return pooled

    def to_message(self) -> dict[str, Any]:
        """Plain values for the wire."""
        return {
            "num_failed": self.num_failed,
            "num_good": self.num_good,
            "num_prompt_tokens": self.num_prompt_tokens,
            "started": self.started,
            "ended": self.ended,
            "latencies": {name: latency.to_message() for name, latency in self.latencies.items()},
            "by_category": {category: asdict(each) for category, each in self.by_category.items()},
            "timeline": self.timeline.to_message(),
            "sendings": self.sendings.to_message(),
        }

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Totals:
        """The inverse of `to_message`."""
        return cls(
            **{name: message[name] for name in ("num_failed", "num_good", "num_prompt_tokens", "started", "ended")},
            latencies={name: Latency.from_message(each) for name, each in message["latencies"].items()},
            by_category={category: Speculation(**each) for category, each in message["by_category"].items()},
            timeline=Timeline.from_message(message["timeline"]),
            sendings=Sendings.from_message(message["sendings"]),
        )
