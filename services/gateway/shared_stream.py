"""Many requests' rows in one call to one coordinator: the gateway's end. See `services/coordinator/lanes.py`.

A lane is read as a call of its own is: `read` gives rows until EOF, or raises. What it has not given yet is bounded by
its window: a reader that takes no rows is sent no more, and holds nobody else up. When the call is lost, every lane is,
and each goes on as one whose own call was lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import grpc

from seqmtp_serve.errors import Unavailable
from seqmtp_serve.tasks import end_tasks
from services.gateway.attempts import Silent
from services.rpc.heartbeat import BEAT_S, SILENCE_S
from services.rpc.status import from_message
from services.rpc.wire import coordinator as messages

WINDOW = 64  # rows of one lane that nobody has read yet
SILENT_LOOKS = round(SILENCE_S / BEAT_S)  # in a row that found nothing new


class NotShared(Exception):
    """The coordinator does not know such calls: nothing of the lane has begun."""


class Lane:
    """One request's rows. `read` and `cancel` belong to one reader."""

    def __init__(self, stream: SharedStream, number: int) -> None:
        self._stream, self.number = stream, number
        self._rows: deque[Any] = deque()
        self._num_read = 0  # since more was granted
        self._end: Exception | None = None
        self.is_over = False  # nothing comes any more, but for what is in `_rows`
        self.began = False
        self._news: asyncio.Future[None] | None = None

    async def read(self) -> Any:
        """The next row, as a message, or EOF. Raises what the call of its own would raise, Silent, or NotShared."""
        while not self._rows:
            if self.is_over:
                if self._end is not None:
                    raise self._end
                return grpc.aio.EOF
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        self._num_read += 1
        if self._num_read >= WINDOW // 2 and not self.is_over:
            self._stream.grant(self.number, self._num_read)
            self._num_read = 0
        return self._rows.popleft()

    def cancel(self) -> None:
        """Nobody reads any more."""
        if not self.is_over:
            self.end()
            self._stream.leave(self.number)

    def take(self, row: Any) -> None:
        """A row came."""
        self.began = True
        self._rows.append(row)
        if row.finish:
            self._stream.forget(self.number)
            self.is_over = True
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        """No row comes after those that did."""
        if not self.is_over:
            self._stream.forget(self.number)
            self.is_over, self._end = True, error
            self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


class SharedStream:
    """One call. It lasts until it is lost, or closed; `is_open` says whether lanes can be opened in it."""

    def __init__(self, address: str, call: Any) -> None:
        self._address, self._call = address, call
        self._numbers = count(1)
        self._lanes: dict[int, Lane] = {}
        self._orders: messages.LaneOrders | None = None  # to be sent next
        self._ordered = asyncio.Event()
        self._num_heard = 0
        self._served = asyncio.Event()  # the first message has come
        self.is_open = True
        self._tasks = [asyncio.create_task(work) for work in (self._read(), self._write(), self._listen())]

    def open(self, wanted: messages.GenerateRequest | messages.AttachRequest) -> Lane:
        """A lane for the rows that such a call would stream."""
        assert self.is_open, "a call that is over has no lanes"
        lane = Lane(self, next(self._numbers))
        self._lanes[lane.number] = lane
        opening = self._order().open.add(lane=lane.number, window=WINDOW)
        if isinstance(wanted, messages.GenerateRequest):
            opening.generate.CopyFrom(wanted)
        else:
            opening.attach.CopyFrom(wanted)
        return lane

    def grant(self, number: int, rows: int) -> None:
        """A lane may send so many rows more."""
        self._order().credit.add(lane=number, rows=rows)

    def leave(self, number: int) -> None:
        """Nobody reads a lane any more."""
        self._order().leave.append(number)

    def forget(self, number: int) -> None:
        """Nothing that still comes for a lane is wanted."""
        self._lanes.pop(number, None)

    async def close(self) -> None:
        """End the call; lanes that are open meet Unavailable."""
        self._lose(lambda: Unavailable("this gateway is closing"))
        await end_tasks(*self._tasks)

    def _order(self) -> messages.LaneOrders:
        if self._orders is None:
            self._orders = messages.LaneOrders()
            self._ordered.set()
        return self._orders

    async def _write(self) -> None:
        """Orders, once the call is served: a write that meets the end of one that is not would hide why it ended."""
        await self._served.wait()
        with suppress(grpc.aio.BaseError, asyncio.InvalidStateError):  # reading sees the call's end
            while True:
                await self._ordered.wait()
                self._ordered.clear()
                orders, self._orders = self._orders, None
                await self._call.write(orders)

    async def _read(self) -> None:
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                self._take(message)
            self._lose(lambda: Unavailable("the coordinator's stream ended early"))
        except grpc.aio.AioRpcError as failure:
            if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
                self._lose(NotShared)
            else:  # INTERNAL, too: a write that meets a lost connection first
                lost = f"{failure.details()} ({failure.code().name})"
                self._lose(lambda: Unavailable(lost))
        except asyncio.CancelledError:
            self._lose(lambda: Unavailable("the coordinator's stream was given up"))
        except ValueError as malformed:
            fault = f"the coordinator's stream is malformed: {malformed}"
            self._lose(lambda: Unavailable(fault))

    def _take(self, message: messages.LaneRows) -> None:
        self._num_heard += 1
        self._served.set()
        for number, row in zip(message.lanes, message.rows, strict=True):
            if (lane := self._lanes.get(number)) is not None:
                lane.take(row)
        for ended in message.ended:
            if (lane := self._lanes.get(ended.lane)) is not None:
                lane.end(from_message(ended.error) if ended.HasField("error") else None)

    async def _listen(self) -> None:
        """Lanes that have begun are told when the coordinator falls silent: it has sent heartbeats since they did.

        Looks are counted and not time: this process may have stood still itself.
        """
        num_heard = num_silent = 0
        while True:
            await asyncio.sleep(BEAT_S)
            num_silent = num_silent + 1 if self._num_heard == num_heard else 0
            num_heard = self._num_heard
            if num_silent >= SILENT_LOOKS:
                for lane in list(self._lanes.values()):
                    if lane.began:
                        lane.end(Silent(f"the coordinator at {self._address} is silent"))
                        self.leave(lane.number)

    def _lose(self, error: Callable[[], Exception]) -> None:
        """The call is over: so is every lane, each with an error of its own."""
        self.is_open = False
        self._call.cancel()
        for lane in list(self._lanes.values()):
            lane.end(error())
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
