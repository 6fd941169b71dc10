"""Coordinators over gRPC. A stream that breaks is opened again, and rows that were seen are passed over.

`Generate` joins a request that runs and takes over one whose coordinator is gone, so opening it again anywhere is
right: rows are the record's, and their versions say which are new.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence

import grpc

from seqmtp_serve.errors import InternalError, Unavailable
from seqmtp_serve.request import CommittedRow, Request
from services.gateway.attempts import Attempts
from services.gateway.coordinators import CoordinatorStatus
from services.gateway.directory import Directory
from services.rpc.channel import connect
from services.rpc.convert import from_wire, to_wire
from services.rpc.status import from_call
from services.rpc.wire import coordinator as messages
from services.rpc.wire import coordinator_rpc

STATUS_TIMEOUT_S = 1.0


class GrpcCoordinators:
    """Every coordinator in the directory, as one. Channels belong to the event loop that first used this object.

    `failover_s` bounds how long a broken stream waits for a coordinator to go on with.
    """

    def __init__(self, directory: Directory, failover_s: float = 20.0) -> None:
        self._directory = directory
        self._failover_s = failover_s
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._streams: Counter[str] = Counter()  # open streams by address
        self._turn = itertools.count()

    async def generate(self, request: Request, meta: Mapping[str, str]) -> AsyncGenerator[CommittedRow, None]:
        """See CoordinatorClient."""
        attempts = Attempts(self._directory, self._turn, self._failover_s)
        seen = 0
        while True:
            address = await attempts.next()
            try:
                async with contextlib.aclosing(self._rows(address, request, meta)) as rows:
                    async for row in rows:
                        if row.version <= seen:
                            continue
                        if row.version != seen + 1:
                            raise InternalError(f"row {row.version} came after row {seen}")
                        seen = row.version
                        attempts.progressed()
                        yield row
                        if row.finish is not None:
                            return
                raise Unavailable("the coordinator's stream ended early")
            except Unavailable as error:
                attempts.lost(error)

    async def status(self) -> Sequence[CoordinatorStatus]:
        """See CoordinatorClient."""
        addresses = await self._directory.addresses()
        await self._forget_absent(addresses)
        replies = await asyncio.gather(*map(self._status_of, addresses))
        return [reply for reply in replies if reply is not None]

    async def close(self) -> None:
        """Close every channel and the directory; streams end."""
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(channel.close() for channel in channels))
        await self._directory.close()

    async def _rows(
        self, address: str, request: Request, meta: Mapping[str, str]
    ) -> AsyncGenerator[CommittedRow, None]:
        """One Generate call. Raises what the coordinator raised, or Unavailable when it is lost."""
        stub = coordinator_rpc.CoordinatorStub(self._channel(address))
        call = stub.Generate(messages.GenerateRequest(request=to_wire(request), meta=dict(meta)))
        self._streams[address] += 1
        try:
            async for message in call:
                yield from_wire(CommittedRow, message)
        except grpc.aio.AioRpcError as failure:
            raise from_call(failure) from failure
        finally:
            self._streams[address] -= 1
            call.cancel()

    async def _status_of(self, address: str) -> CoordinatorStatus | None:
        stub = coordinator_rpc.CoordinatorStub(self._channel(address))
        try:
            reply = await stub.Status(messages.StatusRequest(), timeout=STATUS_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None
        fields = {field.name for field in reply.DESCRIPTOR.fields} - {"counters"}
        return CoordinatorStatus(**{name: getattr(reply, name) for name in fields}, counters=dict(reply.counters))

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = connect(address)
        return self._channels[address]

    async def _forget_absent(self, addresses: Sequence[str]) -> None:
        """Close channels to coordinators that left and are not being read."""
        for address in set(self._channels) - set(addresses):
            if self._streams[address] == 0:
                del self._streams[address]
                await self._channels.pop(address).close()
