"""A servicer's stream that reads and writes at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from seqmtp_serve.tasks import end_tasks

T = TypeVar("T")


async def write_while(
    reading: Coroutine[Any, Any, None], frames: asyncio.Queue[T], write: Callable[[T], Awaitable[None]]
) -> None:
    """Write each frame as it comes, until `reading` has ended and none is left. Raises what `reading` raised.

    The handler itself has to write, and may not end before its write has: gRPC takes no status beside a message that
    is still on its way (GRPC_CALL_ERROR_TOO_MANY_OPERATIONS), and a call without a status hangs at its caller.
    """
    reader = asyncio.create_task(reading)
    try:
        while frames.qsize() or not reader.done():
            if (frame := await _next(frames, reader)) is not None:
                await write(frame)
        reader.result()
    finally:
        await end_tasks(reader)


async def _next(frames: asyncio.Queue[T], reader: asyncio.Task[None]) -> T | None:
    """The next frame, or None when the reader ends before there is one."""
    if frames.qsize():
        return frames.get_nowait()
    getting = asyncio.create_task(frames.get())
    try:
        await asyncio.wait({getting, reader}, return_when=asyncio.FIRST_COMPLETED)
        return getting.result() if getting.done() else None
    finally:
        getting.cancel()
