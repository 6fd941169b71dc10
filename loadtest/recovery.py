"""How long after a spike the service was as before: requests by the moment they were sent, which add up over workers.

The timeline counts answers when they end; here what matters is how those fared that were sent when the spike was over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import floor
from typing import Any

from loadtest.answer import Answer
from loadtest.latency import Latency

SLICE_S = 0.25
TTFT_FACTOR = 1.25  # as before: p95 of TTFT is at most so many times what it was
GOODPUT_SLACK = 0.05  # and the share of good requests at most so much lower
FEWEST_ANSWERS = 10  # of fewer nothing is said


@dataclass(slots=True)
class Sent:
    """Requests sent within a slice. `waited_until`: the Unix time by which each had its first token, or had failed."""

    num_requests: int = 0
    num_good: int = 0
    ttft: Latency = field(default_factory=Latency)
    waited_until: float = 0.0

    def add(self, answer: Answer, is_good: bool, started: float) -> None:
        """Count one whole answer."""
        ttft_ms = answer.ttft_ms or 0.0
        self.num_requests += 1
        self.num_good += is_good
        self.ttft.add(ttft_ms)
        self.waited_until = max(self.waited_until, started + ttft_ms / 1e3)

    def add_failure(self, ended: float) -> None:
        """Count one that gave no whole answer."""
        self.num_requests += 1
        self.waited_until = max(self.waited_until, ended)

    def merge(self, other: Sent) -> None:
        """Count everything `other` counted."""
        self.num_requests += other.num_requests
        self.num_good += other.num_good
        self.ttft.merge(other.ttft)
        self.waited_until = max(self.waited_until, other.waited_until)

    @property
    def goodput_ratio(self) -> float:
        """Good answers over all requests; 0 when there were none."""
        return self.num_good / self.num_requests if self.num_requests else 0.0

    def row(self) -> dict[str, float]:
        """What the report says of a phase."""
        return {
            "requests": self.num_requests,
            "failed": self.num_requests - self.ttft.count,
            "goodput_ratio": self.goodput_ratio,
            "p50_ttft_ms": self.ttft.percentile(50),
            "p95_ttft_ms": self.ttft.percentile(95),
        }


class Sendings:
    """Slices by the moment of sending."""

    def __init__(self, slices: dict[int, Sent] | None = None) -> None:
        self.slices = {} if slices is None else slices

    def at(self, started: float) -> Sent:
        """The slice of a moment."""
        return self.slices.setdefault(int(started // SLICE_S), Sent())

    def pooled(self, begin: float, end: float) -> Sent:
        """The slices that begin in [begin, end), together."""
        found = Sent()
        for number, each in self.slices.items():
            if begin <= number * SLICE_S < end:
                found.merge(each)
        return found

    def merge(self, other: Sendings) -> None:
        """Count everything `other` counted."""
        for number, each in other.slices.items():
            self.slices.setdefault(number, Sent()).merge(each)

    def to_message(self) -> list[Any]:
        """Plain values for the wire."""
        return [
            [number, each.num_requests, each.num_good, each.ttft.to_message(), each.waited_until]
            for number, each in sorted(self.slices.items())
        ]

    @classmethod
    def from_message(cls, message: list[Any]) -> Sendings:
        """The inverse of `to_message`."""
        return cls(
            {
                int(number): Sent(requests, good, Latency.from_message(ttft), until)
                for number, requests, good, ttft, until in message
            }
        )


def recovery(sendings: Sendings, spike: tuple[float, float]) -> dict[str, Any]:
    """What a spike between two Unix times did, and the seconds from its end until

    * `backlog_s`: every request sent in it had its first token, or was refused: nothing of it waits;
    * `ttft_s`: the first moment from which on, to the end of the run, p95 of TTFT and the share of good requests were
      as before the spike (`TTFT_FACTOR`, `GOODPUT_SLACK`); None: they were not, or too few were sent to say;
    * `recovered_s`: both.
    """
    begin, end = spike
    first = floor(begin / SLICE_S) * SLICE_S  # the slices in which it begins and ends are its own, as a whole
    before, during, after = (sendings.pooled(*span) for span in ((0.0, first), (first, end), (end, float("inf"))))
    backlog_s = max(during.waited_until - end, 0.0)
    ttft_s = _back_after(sendings, before, end)
    return {
        "spike_s": end - begin,
        "before": before.row(),
        "during": during.row(),
        "after": after.row(),
        "backlog_s": backlog_s,
        "ttft_s": ttft_s,
        "recovered_s": None if ttft_s is None else max(backlog_s, ttft_s),
    }


def _back_after(sendings: Sendings, before: Sent, end: float) -> float | None:
    """Seconds from `end`; the later slices are taken in from the last one backwards, once each."""
    found, rest = None, Sent()
    for number in sorted(sendings.slices, reverse=True):
        if number * SLICE_S < end:
            break
        rest.merge(sendings.slices[number])
        if _is_as_before(before, rest):
            found = number * SLICE_S - end
    return found


def _is_as_before(before: Sent, rest: Sent) -> bool:
    return (
        min(before.ttft.count, rest.ttft.count) >= FEWEST_ANSWERS
        and rest.ttft.percentile(95) <= TTFT_FACTOR * before.ttft.percentile(95)
        and rest.goodput_ratio >= before.goodput_ratio - GOODPUT_SLACK
    )
