"""An event loop whose clock jumps: nobody waits, and a seed decides everything that a network would."""

from __future__ import annotations

import asyncio


class Stuck(AssertionError):
    """Nothing is left that could ever happen, and the run is not over."""


class _Jump:
    """Stands where a selector would: instead of waiting for sockets it moves the clock to the next timer."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[object]:
        if timeout is None:
            raise Stuck("no timer is set and no task can go on")
        self._loop.now += timeout
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """No sockets, no threads. `time()` is virtual seconds since the start; callbacks keep asyncio's own order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._selector = _Jump(self)  # what BaseEventLoop waits with

    def time(self) -> float:
        return self.now

    def _process_events(self, event_list: list[object]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody sleeps."""
