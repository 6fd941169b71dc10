"""A run in slices of time, which add up across worker processes: what a ramp, a spike or a soak did, and when."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from loadtest.answer import Answer

SLICE_S = 1.0


@dataclass(slots=True)
class Slice:
    """Answers that ended within it, as sums. `ttft_ms` and `tpot_ms` are summed over those that have one."""

    num_answers: int = 0
    num_failed: int = 0
    num_good: int = 0
    num_tokens: int = 0
    num_rounds: int = 0
    num_accepted: int = 0
    ttft_ms: float = 0.0
    num_ttft: int = 0
    tpot_ms: float = 0.0
    num_tpot: int = 0

    def add(self, answer: Answer, is_good: bool) -> None:
        """Count one whole answer."""
        told = answer.speculation or {}
        self.num_answers += 1
        self.num_good += is_good
        self.num_tokens += answer.num_tokens
        self.num_rounds += told.get("num_spec_steps") or 0
        self.num_accepted += told.get("num_accepted_draft_tokens") or 0
        if answer.ttft_ms is not None:
            self.ttft_ms, self.num_ttft = self.ttft_ms + answer.ttft_ms, self.num_ttft + 1
        if answer.tpot_ms is not None:
            self.tpot_ms, self.num_tpot = self.tpot_ms + answer.tpot_ms, self.num_tpot + 1

    def merge(self, other: Slice) -> None:
        """Count everything `other` counted."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


class Timeline:
    """Slices by the Unix second in which an answer ended."""

    def __init__(self, slices: dict[int, Slice] | None = None) -> None:
        self.slices = {} if slices is None else slices

    def at(self, ended: float) -> Slice:
        """The slice of a moment."""
        return self.slices.setdefault(int(ended // SLICE_S), Slice())

    def merge(self, other: Timeline) -> None:
        """Count everything `other` counted."""
        for number, each in other.slices.items():
            self.slices.setdefault(number, Slice()).merge(each)

    def to_message(self) -> list[Any]:
        """Plain values for the wire."""
        return [[number, _rounded(each)] for number, each in sorted(self.slices.items())]

    @classmethod
    def from_message(cls, message: list[Any]) -> Timeline:
        """The inverse of `to_message`."""
        return cls({int(number): Slice(**each) for number, each in message})

    def rows(self) -> list[dict[str, float | None]]:
        """Seconds since the first slice, and what each had; slices without an answer are there, empty."""
        if not self.slices:
            return []
        first, last = min(self.slices), max(self.slices)
        return [_row((number - first) * SLICE_S, self.slices.get(number, Slice())) for number in range(first, last + 1)]


def _rounded(each: Slice) -> dict[str, float]:
    return {name: round(value, 6) for name, value in asdict(each).items()}


def _row(at_s: float, each: Slice) -> dict[str, float | None]:
    return {
        "at_s": at_s,
        "answers": each.num_answers,
        "failed": each.num_failed,
        "good": each.num_good,
        "output_throughput": each.num_tokens / SLICE_S,
        "mean_ttft_ms": each.ttft_ms / each.num_ttft if each.num_ttft else None,
        "mean_tpot_ms": each.tpot_ms / each.num_tpot if each.num_tpot else None,
        "e_r_verified": 1 + each.num_accepted / each.num_rounds if each.num_rounds else None,
    }
