"""Signs of life in a stream of rows: a reader tells a coordinator that is stopped from one that has no news.

A connection to a stopped process stays open, and gRPC's own pings take two seconds to find it. Here a row of version 0,
which no record has, is sent after the first row, and then whenever there was no other for `BEAT_S`. A reader that has
seen one, and then nothing for `SILENCE_S`, goes on at another coordinator; being wrong costs it a second reading of the
rows. A request that waits for its first row has no heartbeat: there may be very many of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import grpc

from seqmtp_serve.tasks import end_tasks
from services.rpc.wire import common

BEAT_S = 0.2
SILENCE_S = 0.8
HEARTBEAT = common.CommittedRow()

Write = Callable[[common.CommittedRow], Awaitable[None]]


class Heartbeats:
    """Writes of one stream: `tell` its rows, and heartbeats come between them until it is closed.

    One write at a time. A timer looks a few times a second, whatever the rows' pace: a row costs it nothing.
    """

    def __init__(self, write: Write, beat_s: float = BEAT_S) -> None:
        self._write, self._beat_s = write, beat_s
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self._told_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._beating: asyncio.Task[None] | None = None

    async def tell(self, row: common.CommittedRow) -> None:
        """Write the row; after the first one a heartbeat. Raises what writing raises."""
        async with self._turn:
            await self._write(row)
            if self._timer is None:
                await self._write(HEARTBEAT)
                self._timer = self._loop.call_later(self._beat_s, self._look)
            self._told_at = self._loop.time()

    async def aclose(self) -> None:
        """No heartbeat follows."""
        if self._timer is not None:
            self._timer.cancel()
        if self._beating is not None:
            await end_tasks(self._beating)

    def _look(self) -> None:
        quiet_s = self._loop.time() - self._told_at
        if quiet_s >= self._beat_s and not self._turn.locked():  # else a write is on its way, and nobody takes it
            self._beating = self._loop.create_task(self._beat())
            quiet_s = 0.0
        self._timer = self._loop.call_later(max(0.0, self._beat_s - quiet_s) or self._beat_s, self._look)

    async def _beat(self) -> None:
        with contextlib.suppress(grpc.aio.BaseError, asyncio.InvalidStateError):  # the stream's own writes see its end
            async with self._turn:
                await self._write(HEARTBEAT)
                self._told_at = self._loop.time()
