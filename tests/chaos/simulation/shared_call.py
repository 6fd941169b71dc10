"""Clients behind one gateway: their rows come in one call to each coordinator, by the product's own two ends of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any
from weakref import WeakKeyDictionary

import grpc

from seqmtp_serve.errors import Unavailable
from seqmtp_serve.request import CommittedRow, Request
from seqmtp_serve.tasks import end_tasks
from services.coordinator.lanes import Lanes
from services.gateway.shared_stream import SharedStream
from services.rpc.convert import from_wire, to_wire
from services.rpc.wire import coordinator as messages
from tests.chaos.simulation.client import SimClient
from tests.chaos.simulation.coordinator import SimCoordinator
from tests.chaos.simulation.network import Network, Pipe, Process


class _Call:
    """One call over the simulated network: what either end writes arrives in order, or the call breaks."""

    def __init__(self, network: Network, gateway: Process, coordinator: SimCoordinator) -> None:
        self._orders: asyncio.Queue[bytes] = asyncio.Queue()
        self._rows: asyncio.Queue[bytes | None] = asyncio.Queue()  # None: it is broken
        self._there = Pipe(network, gateway, coordinator.process, self._break)
        self._back = Pipe(network, coordinator.process, gateway, self._break)
        self._lanes = Lanes(lambda opening: _rows_of(coordinator, from_wire(Request, opening.generate.request)))
        self.serving = asyncio.ensure_future(coordinator.while_alive(self._lanes.serve(self._take, self._give)))
        self.serving.add_done_callback(lambda _: self._there.send(self._break))

    async def read(self) -> Any:
        """At the gateway."""
        if (data := await self._rows.get()) is None:
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())
        return messages.LaneRows.FromString(data)

    async def write(self, orders: messages.LaneOrders) -> None:
        """At the gateway."""
        data = orders.SerializeToString()
        self._there.send(lambda: self._orders.put_nowait(data))

    def cancel(self) -> None:
        """At the gateway."""
        self.serving.cancel()

    async def _take(self) -> Any:
        return messages.LaneOrders.FromString(await self._orders.get())

    async def _give(self, rows: messages.LaneRows) -> None:
        data = rows.SerializeToString()
        self._back.send(lambda: self._rows.put_nowait(data))

    def _break(self) -> None:
        self._rows.put_nowait(None)


async def _rows_of(coordinator: SimCoordinator, request: Request) -> AsyncGenerator[CommittedRow, None]:
    async for row in await coordinator.driver.submit(request):
        yield row


class _Gateway:
    """The calls of one world, as long as any of its clients runs."""

    def __init__(self) -> None:
        self._process = Process("gateway")
        self._calls: dict[SimCoordinator, tuple[_Call, SharedStream]] = {}
        self.num_clients = 0

    def stream_to(self, network: Network, coordinator: SimCoordinator) -> SharedStream:
        """The one that there is, or a new one."""
        found = self._calls.get(coordinator)
        if found is None or not found[1].is_open:
            call = _Call(network, self._process, coordinator)
            found = self._calls[coordinator] = call, SharedStream(coordinator.process.name, call)
        return found[1]

    async def close(self) -> None:
        for call, stream in self._calls.values():
            await stream.close()
            await end_tasks(call.serving)


_gateways: WeakKeyDictionary[Network, _Gateway] = WeakKeyDictionary()


class SharedClient(SimClient):
    """Reads as a lane, which it leaves when it turns to another coordinator."""

    async def run(self) -> None:
        gateway = _gateways.setdefault(self._network, _Gateway())
        gateway.num_clients += 1
        await super().run()
        gateway.num_clients -= 1
        if not gateway.num_clients:
            await gateway.close()

    def _connected(self, coordinator: SimCoordinator) -> asyncio.Future[None]:
        return asyncio.ensure_future(self._read(coordinator))

    async def _rows(self, coordinator: SimCoordinator) -> AsyncGenerator[CommittedRow, None]:
        stream = _gateways[self._network].stream_to(self._network, coordinator)
        lane = stream.open(messages.GenerateRequest(request=to_wire(self._request)))
        try:
            while (message := await lane.read()) is not grpc.aio.EOF:
                yield from_wire(CommittedRow, message)
        finally:
            lane.cancel()
        raise Unavailable("the lane ended early")
