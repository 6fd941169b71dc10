"""A servicer's stream that reads and writes at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from seqmtp_serve.tasks import end_tasks

T = TypeVar("T")
_END = object()


async def write_while(
    reading: Coroutine[Any, Any, None], frames: asyncio.Queue[T], write: Callable[[T], Awaitable[None]]
) -> None:
    """Write each frame as it comes, until `reading` has ended and none is left. Raises what `reading` raised.

    The handler itself has to write, and may not end before its write has: gRPC takes no status beside a message that
    is still on its way (GRPC_CALL_ERROR_TOO_MANY_OPERATIONS), and a call without a status hangs at its caller.
    """
    reader = asyncio.create_task(reading)
    waiting: asyncio.Queue[Any] = frames
    reader.add_done_callback(lambda _: _wake(waiting))
    try:
        while frames.qsize() or not reader.done():
            if (frame := await waiting.get()) is not _END:
                await write(frame)
        reader.result()
    finally:
        await end_tasks(reader)


def _wake(frames: asyncio.Queue[Any]) -> None:
    """Let whoever waits for a frame see that none comes any more. Nobody waits at a queue that is full."""
    with contextlib.suppress(asyncio.QueueFull):
        frames.put_nowait(_END)
