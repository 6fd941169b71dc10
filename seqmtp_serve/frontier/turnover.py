"""When a caller who was turned away should come back: derived from how fast places become free, never a constant.

A full queue frees a place each time a request ends, so the n-th caller turned away since the last end waits n mean
intervals between ends. What is away altogether (a target, a store) gives no rate: its callers wait as long as it has
been away already, which keeps their number of attempts logarithmic in the outage.
"""

from __future__ import annotations

SHORTEST_S = 1.0
LONGEST_S = 60.0
SMOOTHING = 0.2  # weight of the newest interval


class Turnover:
    """Counts ends and refusals. Times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self._ended_at: float | None = None
        self._interval_s: float | None = None
        self._num_refused = 0

    def ended(self, now: float) -> None:
        """A request ended: a place is free."""
        if self._ended_at is not None:
            interval_s = now - self._ended_at
            old = interval_s if self._interval_s is None else self._interval_s
            self._interval_s = old + SMOOTHING * (interval_s - old)
        self._ended_at, self._num_refused = now, 0

    def refused(self, now: float) -> float:
        """Another caller is turned away: the seconds to tell it."""
        self._num_refused += 1
        if self._interval_s is None or self._ended_at is None:
            return SHORTEST_S  # nothing is known
        slow_s = max(self._interval_s, now - self._ended_at)  # an end that is overdue shows a slower pace
        return bounded(self._num_refused * slow_s)


def bounded(wait_s: float) -> float:
    """A wait worth telling."""
    return min(max(wait_s, SHORTEST_S), LONGEST_S)
