"""One reading of a request's rows at one coordinator: as a lane of the gateway's call to it, or as a call of its own.

Both give the same rows and end in the same errors. The call of its own is the plain form: it is taken where the
coordinator knows no other, and for a request so large that others would wait behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from time import monotonic
from typing import Any

import grpc

from seqmtp_serve.request import CommittedRow
from services.gateway.attempts import Silent
from services.gateway.pulse import Pulses
from services.gateway.shared_stream import NotShared, SharedStream
from services.rpc.convert import from_wire
from services.rpc.heartbeat import SILENCE_S
from services.rpc.status import from_call
from services.rpc.wire import coordinator as messages
from services.rpc.wire import coordinator_rpc

MAX_OPENING_BYTES = 2**18
ASK_AGAIN_S = 60.0  # whether a coordinator that did not know shared calls does now

Wanted = messages.GenerateRequest | messages.AttachRequest


class RowStreams:
    """Readings at any coordinator. `channel_to` gives the channel to an address; without `shared` all are plain."""

    def __init__(self, channel_to: Callable[[str], grpc.aio.Channel], pulses: Pulses, *, shared: bool) -> None:
        self._channel_to, self._pulses, self._shares = channel_to, pulses, shared
        self._shared: dict[str, SharedStream] = {}
        self._plain_until: dict[str, float] = {}
        self._num_open: Counter[str] = Counter()  # readings by address

    def is_reading(self, address: str) -> bool:
        """Whether any rows are read there."""
        return self._num_open[address] > 0

    async def rows(self, address: str, wanted: Wanted, *, impatient: bool) -> AsyncGenerator[CommittedRow, None]:
        """Raises what the coordinator raised, Unavailable when it is lost, Silent when its heart stops.

        `impatient`: also before the first row, as there is another coordinator.
        """
        self._num_open[address] += 1
        try:
            if self._is_shared(address) and wanted.ByteSize() <= MAX_OPENING_BYTES:
                try:
                    async with contextlib.aclosing(self._laned(address, wanted, impatient)) as rows:
                        async for row in rows:
                            yield row
                    return
                except NotShared:
                    self._plain_until[address] = monotonic() + ASK_AGAIN_S
            async with contextlib.aclosing(self._plain(address, wanted, impatient)) as rows:
                async for row in rows:
                    yield row
        finally:
            self._num_open[address] -= 1

    async def forget(self, address: str) -> None:
        """Nobody reads there any more."""
        del self._num_open[address]
        self._plain_until.pop(address, None)
        if (stream := self._shared.pop(address, None)) is not None:
            await stream.close()

    async def close(self) -> None:
        """End every shared call."""
        streams, self._shared = list(self._shared.values()), {}
        await asyncio.gather(*(stream.close() for stream in streams))

    def _is_shared(self, address: str) -> bool:
        return self._shares and monotonic() >= self._plain_until.get(address, 0.0)

    async def _laned(self, address: str, wanted: Wanted, impatient: bool) -> AsyncGenerator[CommittedRow, None]:
        lane = self._stream_to(address).open(wanted)
        try:
            reading = lane.read()
            message = await (self._pulses.unless_silent(address, reading) if impatient else reading)
            while message is not grpc.aio.EOF:
                yield from_wire(CommittedRow, message)
                message = await lane.read()
        finally:
            lane.cancel()

    async def _plain(self, address: str, wanted: Wanted, impatient: bool) -> AsyncGenerator[CommittedRow, None]:
        stub = coordinator_rpc.CoordinatorStub(self._channel_to(address))
        call: Any = stub.Generate(wanted) if isinstance(wanted, messages.GenerateRequest) else stub.Attach(wanted)
        patience_s = None  # until it has shown that it sends heartbeats
        try:
            while True:
                if patience_s is None and impatient:
                    message = await self._pulses.unless_silent(address, call.read())
                else:
                    async with asyncio.timeout(patience_s):
                        message = await call.read()
                if message is grpc.aio.EOF:
                    return
                if message.version == 0:
                    patience_s = SILENCE_S
                else:
                    yield from_wire(CommittedRow, message)
        except TimeoutError:
            raise Silent(f"the coordinator at {address} is silent") from None
        except grpc.aio.AioRpcError as failure:
            raise from_call(failure) from failure
        finally:
            call.cancel()

    def _stream_to(self, address: str) -> SharedStream:
        stream = self._shared.get(address)
        if stream is None or not stream.is_open:
            call = coordinator_rpc.CoordinatorStub(self._channel_to(address)).Lanes()
            stream = self._shared[address] = SharedStream(address, call)
        return stream
