"""When a user sends its next request. A user waits for its answer first, so a slow server delays arrivals: the lag.

Enough users keep the lag near zero; then arrivals are those of an open system.
"""

from __future__ import annotations

import random


class PoissonArrivals:
    """Due times at a mean rate, in seconds of whatever clock the caller reads."""

    def __init__(self, rate_per_s: float, draws: random.Random, now: float) -> None:
        self._rate, self._draws = rate_per_s, draws
        self._due = now + draws.expovariate(rate_per_s)

    def next_wait(self, now: float) -> tuple[float, float]:
        """(seconds to wait, seconds late): one of them is 0. Moves on to the next due time."""
        due = self._due
        self._due += self._draws.expovariate(self._rate)
        return max(due - now, 0.0), max(now - due, 0.0)
