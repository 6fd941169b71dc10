"""Who reads which request, and the grace time once nobody does: a generation outlives its readers for a while."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Audience:
    """Counts readers. `on_abandoned(request_id)` is called when a request had none for `grace_s` seconds.

    All methods belong to one event loop. A request is watched once it was read here, or from `expect` on.
    """

    def __init__(self, *, grace_s: float, on_abandoned: Callable[[str], None]) -> None:
        self._grace_s = grace_s
        self._on_abandoned = on_abandoned
        self._num_readers: Counter[str] = Counter()
        self._grace: dict[str, asyncio.TimerHandle] = {}

    @property
    def num_readers(self) -> int:
        """Streams being read."""
        return sum(self._num_readers.values())

    @contextmanager
    def reading(self, request_id: str) -> Iterator[None]:
        """While inside, the request has a reader. Leave normally only at the request's end: nothing is left to stop."""
        self._num_readers[request_id] += 1
        self._stop_clock(request_id)
        try:
            yield
        except BaseException:
            self._left(request_id)
            if not self._num_readers[request_id]:
                self._start_clock(request_id, self._grace_s)
            raise
        else:
            self._left(request_id)
        finally:
            self._num_readers += Counter()  # drops zeros

    def expect(self, request_id: str, *, at_least_s: float = 0.0) -> None:
        """Somebody is to read it: from now on its grace time runs, unless it has a reader."""
        if not self._num_readers[request_id]:
            self._stop_clock(request_id)
            self._start_clock(request_id, max(self._grace_s, at_least_s))

    @property
    def is_there(self) -> bool:
        """Whether anybody reads anything here."""
        return bool(self._num_readers)

    def close(self) -> None:
        """Abandon nothing any more."""
        for timer in self._grace.values():
            timer.cancel()
        self._grace.clear()

    def check(self) -> None:
        """Nobody reads: then no reader is counted."""
        assert not self._num_readers

    def _left(self, request_id: str) -> None:
        self._num_readers[request_id] -= 1

    def _start_clock(self, request_id: str, grace_s: float) -> None:
        self._grace[request_id] = asyncio.get_running_loop().call_later(grace_s, self._expire, request_id)

    def _stop_clock(self, request_id: str) -> None:
        if (timer := self._grace.pop(request_id, None)) is not None:
            timer.cancel()

    def _expire(self, request_id: str) -> None:
        del self._grace[request_id]
        self._on_abandoned(request_id)
