"""Tasks that run beside others, and how they end for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

AGAIN_S = 1.0  # longer than a task that was cancelled needs to clean up


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel until all are done. What they raised is theirs, and not raised here.

    Asking once is not enough: on Python 3.11 `asyncio.wait_for`, with which redis-py sends, answers a cancellation that
    meets its result with the result (CPython gh-86296, gone in 3.12), and the task goes on as if nobody had asked.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)


class Background:
    """Tasks that run until they are ended together. `died` is told the error of one that ends by one."""

    def __init__(self, died: Callable[[BaseException], None]) -> None:
        self._died = died
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Begin one."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[None]]:
        return iter(tuple(self._tasks))

    async def end(self) -> None:
        """Cancel all that run; returns when they are gone."""
        await end_tasks(*self._tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._died(error)
