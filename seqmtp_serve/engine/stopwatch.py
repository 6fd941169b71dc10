"""The disjoint costs of one step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Milliseconds by phase; a phase entered twice adds up."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self._ms: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time inside to `name`. Phases must not nest: they would be charged twice."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._ms[name] = self.ms(name) + (time.perf_counter() - start) * 1e3

    def ms(self, name: str) -> float:
        """What was charged to `name` so far."""
        return self._ms.get(name, 0.0)

    def elapsed_s(self) -> float:
        """Seconds since the watch was made."""
        return time.perf_counter() - self.started
