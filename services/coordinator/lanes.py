"""Many requests' rows in one call: the coordinator's end. Each request is a lane, which is read at its own pace.

A lane is a task that reads as a call of its own would, and puts its rows into the message that is to be sent next: so
all rows of a step travel as one. It stands still while its window is full; rows wait for it where they always do, with
the request. A message is taken for sending when the one before has left, and may grow until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any

import grpc

from seqmtp_serve.errors import InternalError, ProtocolError, SeqMTPError
from seqmtp_serve.request import CommittedRow
from seqmtp_serve.tasks import end_tasks
from services.rpc.channel import MAX_MESSAGE_BYTES
from services.rpc.convert import to_wire
from services.rpc.duplex import write_while
from services.rpc.heartbeat import BEAT_S
from services.rpc.status import to_message
from services.rpc.wire import common, coordinator

FULL_BYTES = 2**20  # of a message with more than one row
MAX_ROW_BYTES = MAX_MESSAGE_BYTES - 1024  # a larger one would cost every lane its call

RowsOf = Callable[[coordinator.LaneOpening], AsyncGenerator[CommittedRow, None]]
log = logging.getLogger(__name__)


class _Lane:
    """One request's way through the call: how many rows it may still send, and the task that does."""

    def __init__(self, opening: coordinator.LaneOpening, run: Callable[[_Lane], Coroutine[Any, Any, None]]) -> None:
        self.opening, self._room, self._more = opening, opening.window, asyncio.Event()
        self.task = asyncio.create_task(run(self))

    def grant(self, rows: int) -> None:
        """So many rows more."""
        self._room += rows
        self._more.set()

    async def room_for_one(self) -> None:
        """Take a place in the window, once there is one."""
        while self._room <= 0:
            self._more.clear()
            await self._more.wait()
        self._room -= 1


class Lanes:
    """One call of one gateway. `rows_of` gives the rows that an opening asks for, and raises what the call would."""

    def __init__(self, rows_of: RowsOf, beat_s: float = BEAT_S) -> None:
        self._rows_of, self._beat_s = rows_of, beat_s
        self._lanes: dict[int, _Lane] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._outbox: asyncio.Queue[coordinator.LaneRows] = asyncio.Queue()
        self._filling: coordinator.LaneRows | None = None  # the last of the outbox, while it takes rows
        self._filled_bytes = 0
        self._sent_at = 0.0
        self._closing = False
        self._over = asyncio.Event()

    async def serve(
        self, read: Callable[[], Awaitable[Any]], write: Callable[[coordinator.LaneRows], Awaitable[None]]
    ) -> None:
        """Until the gateway leaves, or `close` was called and no lane is left. Raises ProtocolError for bad orders.

        Lanes that are open at its end are left, as when a call of their own is cancelled.
        """

        async def send(message: coordinator.LaneRows) -> None:
            if message is self._filling:
                self._filling = None
            await write(message)
            self._sent_at = asyncio.get_running_loop().time()

        self._message()  # it is served here: the gateway gives no order before
        beating = asyncio.create_task(self._beat())
        try:
            await write_while(self._until_over(read), self._outbox, send)
        finally:
            await end_tasks(beating, *self._leaving, *(lane.task for lane in self._lanes.values()))

    def close(self) -> None:
        """The call ends with its last lane."""
        self._closing = True
        self._look_whether_over()

    async def _until_over(self, read: Callable[[], Awaitable[Any]]) -> None:
        taking, over = asyncio.create_task(self._take_orders(read)), asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait({taking, over}, return_when=asyncio.FIRST_COMPLETED)
            if taking.done():
                taking.result()
        finally:
            await end_tasks(taking, over)

    async def _take_orders(self, read: Callable[[], Awaitable[Any]]) -> None:
        while (orders := await read()) is not grpc.aio.EOF:
            for opening in orders.open:
                self._open(opening)
            for credit in orders.credit:
                if (lane := self._lanes.get(credit.lane)) is not None:
                    lane.grant(credit.rows)
            for number in orders.leave:
                if (lane := self._lanes.get(number)) is not None:
                    leaving = asyncio.create_task(end_tasks(lane.task))
                    self._leaving.add(leaving)
                    leaving.add_done_callback(self._leaving.discard)

    def _open(self, opening: coordinator.LaneOpening) -> None:
        if opening.lane in self._lanes:
            raise ProtocolError(f"lane {opening.lane} is open already")
        lane = self._lanes[opening.lane] = _Lane(opening, self._run)
        lane.task.add_done_callback(lambda _: self._left(opening.lane))

    def _left(self, number: int) -> None:
        del self._lanes[number]
        self._look_whether_over()

    def _look_whether_over(self) -> None:
        if self._closing and not self._lanes:
            self._over.set()

    async def _run(self, lane: _Lane) -> None:
        number = lane.opening.lane
        end, has_last = coordinator.LaneEnd(lane=number), False
        try:
            async with contextlib.aclosing(self._rows_of(lane.opening)) as rows:
                async for row in rows:
                    await lane.room_for_one()
                    self._tell(number, to_wire(row))
                    has_last = row.finish is not None
        except SeqMTPError as error:
            end.error.CopyFrom(to_message(error))
        except Exception as error:  # ours: this lane ends, the others go on
            log.exception("lane %d", number)
            end.error.CopyFrom(to_message(InternalError(f"{type(error).__name__}: {error}")))
        if not has_last or end.HasField("error"):
            self._message().ended.append(end)

    def _tell(self, number: int, row: common.CommittedRow) -> None:
        num_bytes = row.ByteSize()
        if num_bytes > MAX_ROW_BYTES:
            raise InternalError(f"row {row.version} is too large to be sent: {num_bytes} bytes")
        if self._filled_bytes + num_bytes > FULL_BYTES:
            self._filling = None
        message = self._message()
        message.lanes.append(number)
        message.rows.append(row)
        self._filled_bytes += num_bytes
        if num_bytes > FULL_BYTES:
            self._filling = None

    def _message(self) -> coordinator.LaneRows:
        """The one that takes rows."""
        if self._filling is None:
            self._filling, self._filled_bytes = coordinator.LaneRows(), 0
            self._outbox.put_nowait(self._filling)
        return self._filling

    async def _beat(self) -> None:
        """A sign of life at least so often, while there are lanes; no second one while the first is on its way."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._beat_s / 2)
            if self._lanes and self._outbox.empty() and loop.time() - self._sent_at >= self._beat_s / 2:
                self._message()
