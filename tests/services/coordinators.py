"""Coordinators of one process on fake target groups: real drivers, real gRPC, a real store. They die without a word."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from seqmtp_serve.config import SchedulerConfig
from seqmtp_serve.fake import FAKE_INFO, FakeTargetGroup, fake_piece
from seqmtp_serve.request import CommittedRow, Request, SamplingParams
from seqmtp_serve.rounds import RoundDriver
from seqmtp_serve.tasks import end_tasks
from services.coordinator.leases import keep_leases
from services.coordinator.owners import Owners
from services.coordinator.reader import RequestReader
from services.coordinator.recovery_scan import RecoveryScan
from services.coordinator.round_ledger import RoundLedger
from services.coordinator.round_spans import RoundSpans
from services.coordinator.servicer import CoordinatorServicer
from services.registry import Registry
from services.rpc import channel, status
from services.rpc.convert import from_wire, to_wire
from services.rpc.wire import coordinator as messages
from services.rpc.wire import coordinator_rpc
from services.store.client import RedisFrontierStore
from services.store.embedded import EmbeddedValkey
from services.store.notes import NoteStore
from services.store.pressure import StorePressure
from tests.patience import PATIENT

CONFIG = SchedulerConfig(max_batch=4, step_tokens=64, retry_first_s=0.005, retry_max_s=0.05, lease_s=30.0)
INFO = replace(FAKE_INFO, max_model_len=4096, num_pages=4096)


def a_request(name: str, **params: Any) -> Request:
    return Request(request_id=name, prompt_ids=(3, 1, 4), params=SamplingParams(**{"max_tokens": 300, **params}))


class NoProposerToLookAt:
    """What a coordinator asks its link to the target for its own status."""

    proposer_ready, proposer_detail = True, ""
    spans = RoundSpans(0.0)

    async def look_at_proposer(self) -> None:
        pass


class Node:
    """One coordinator. `kill` leaves everything as it is: the record, its lease and its entry in the registry."""

    def __init__(
        self,
        valkey: EmbeddedValkey,
        name: str,
        *,
        grace_s: float = 30.0,
        delay_s: float = 0.003,
        target: Any = None,
        config: SchedulerConfig = CONFIG,
    ) -> None:
        self.name = name
        self.target = FakeTargetGroup(INFO, delay_s=delay_s) if target is None else target
        asked: Any = NoProposerToLookAt() if target is None else target
        self.store = RedisFrontierStore(valkey.url, PATIENT, watch=asked.spans.commit)
        self.registry = Registry(self.store.redis)
        self.driver = RoundDriver(self.target, self.store, config, lambda _: fake_piece, owner=name)
        self.owners = Owners(name, self.registry, lease_s=CONFIG.lease_s)
        self.reader = RequestReader(self.driver, self.store, self.owners, grace_s=grace_s)
        pressure = StorePressure(self.store.redis, limit_bytes=2**30, window_s=600.0)
        self.ledger = RoundLedger(
            self.driver.notes, NoteStore(self.store.redis, window_s=600.0), self.reader, self.owners
        )
        self.servicer = CoordinatorServicer(
            name,
            self.driver,
            asked,
            self.reader,
            self.ledger,
            admit=lambda: None,
            grace_s=grace_s,
            store_levels=pressure.levels,
        )
        self.scan = RecoveryScan(
            self.store,
            self.reader,
            self.owners,
            is_live=self.driver.is_live,
            adopted=self.servicer.expect_reader,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._server = channel.new_server()
        self.address = ""

    async def start(self) -> Node:
        coordinator_rpc.add_CoordinatorServicer_to_server(self.servicer, self._server)
        self.address = channel.bind(self._server, "127.0.0.1", 0)
        await self._server.start()
        await self.driver.start()
        while not self.driver.status().target_ready:
            await asyncio.sleep(0.001)
        await self.registry.register("coordinator", self.name, self.address, ttl_s=600)
        self._tasks = [
            asyncio.create_task(keep_leases(self.driver.owned, self.store, CONFIG.lease_s, self.driver.renewed)),
            asyncio.create_task(self.ledger.keep()),
        ]
        return self

    async def kill(self) -> None:
        tasks, self._tasks = (*self._tasks, *self.driver._background), []
        for task in tasks:
            task.cancel()
        self.servicer.close()
        await self._server.stop(None)
        await end_tasks(*tasks)  # one that was writing to the store may not have heard

    async def forgotten(self) -> None:
        """Its entry in the registry lapses."""
        await self.registry.remove("coordinator", self.name)

    async def stop(self) -> None:
        await self.kill()
        await self.driver.close()
        await self.store.close()

    @contextlib.asynccontextmanager
    async def stub(self) -> AsyncIterator[coordinator_rpc.CoordinatorStub]:
        async with channel.connect(self.address) as connection:
            yield coordinator_rpc.CoordinatorStub(connection)

    async def begin(self, request: Request, **meta: str) -> messages.Record:
        async with self.stub() as stub:
            return await stub.Start(messages.GenerateRequest(request=to_wire(request), meta=meta))

    async def generate(self, request: Request) -> AsyncIterator[CommittedRow]:
        async with self.stub() as stub:
            async for row in _rows(stub.Generate(messages.GenerateRequest(request=to_wire(request)))):
                yield row

    async def attach(self, request_id: str, after_version: int = 0) -> AsyncIterator[CommittedRow]:
        async with self.stub() as stub:
            call = stub.Attach(messages.AttachRequest(request_id=request_id, after_version=after_version))
            async for row in _rows(call):
                yield row


async def _rows(call: Any) -> AsyncIterator[CommittedRow]:
    try:
        async for message in call:
            yield from_wire(CommittedRow, message)
    except channel.grpc.aio.AioRpcError as failure:
        raise status.from_call(failure) from failure
    finally:
        call.cancel()


@contextlib.asynccontextmanager
async def nodes(valkey: EmbeddedValkey, *names: str, **options: Any) -> AsyncIterator[list[Node]]:
    """Started coordinators over one emptied store; all gone at the end, and their targets hold nothing."""
    started = [Node(valkey, name, **options) for name in names]
    await started[0].store.redis.flushall()
    try:
        async with asyncio.timeout(240):
            for node in started:
                await node.start()
            yield started
    finally:
        for node in started:
            await node.stop()
