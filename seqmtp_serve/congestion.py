"""When to stop admitting because somebody else holds the pages of a shared target group.

Two coordinators that meet on one group would admit, refuse and replay in step for ever. Each pauses for a random time,
longer after each refusal: one of them gets through.
"""

from __future__ import annotations

from collections.abc import Callable

from seqmtp_serve.config import SchedulerConfig


class Congestion:
    """Pauses grow by half up to `retry_max_s`, and shrink a little with each step that was not refused."""

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float], draw: Callable[[], float]) -> None:
        self._config, self._clock, self._draw = config, clock, draw
        self._delay_s = config.retry_first_s
        self._until = clock()

    def observe(self, refused: bool) -> None:
        """Take note of one step; `draw` gives a number in [0, 1)."""
        if refused:
            self._delay_s = min(1.5 * self._delay_s, self._config.retry_max_s)
            self._until = self._clock() + self._delay_s * (0.5 + self._draw())
        else:
            self._delay_s = max(0.9 * self._delay_s, self._config.retry_first_s)

    @property
    def pause_s(self) -> float:
        """Seconds until admission goes on; 0 when it may now."""
        return max(0.0, self._until - self._clock())
