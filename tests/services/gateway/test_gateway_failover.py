"""Coordinators over gRPC that die, refuse or come back: a stream loses no row, repeats none, and ends in time.

Each test runs twice: with coordinators that know the shared call, and with those that know only calls for one request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from seqmtp_serve.errors import Draining, NotReady, Overloaded, SeqMTPError, StaleVersion, Unavailable
from seqmtp_serve.frontier.ancestry import digest_of, initial_digest
from seqmtp_serve.request import CommittedRow, FinishReason, Request, SamplingParams
from seqmtp_serve.tasks import end_tasks
from services.coordinator.lanes import Lanes
from services.gateway.directory import FixedDirectory
from services.gateway.grpc_coordinators import GrpcCoordinators
from services.rpc.channel import bind, new_server
from services.rpc.convert import from_wire, to_wire
from services.rpc.heartbeat import BEAT_S, HEARTBEAT
from services.rpc.status import abort, from_message
from services.rpc.wire import common, coordinator_rpc
from services.rpc.wire import coordinator as messages

REQUEST = Request(request_id="r", prompt_ids=(1, 2), params=SamplingParams(seed=9, stop=("x",)))
NUM_ROWS = 6


def row(version: int, request_id: str = "r") -> CommittedRow:
    """Row `version` of a text that depends on nothing else: what a replay anywhere gives again."""
    last = version == NUM_ROWS
    return CommittedRow(
        request_id=request_id,
        version=version,
        tokens=(10 * version, 10 * version + 1),
        drafted=3,
        accepted=1,
        origins="ac",
        finish=FinishReason.STOP if last else None,
        stop_reason="x" if last else None,
        epoch=1,
        digest=digest_of(REQUEST.prompt_ids, [(10 * each, 10 * each + 1) for each in range(1, version + 1)]),
    )


class Scripted(coordinator_rpc.CoordinatorServicer):
    """Streams rows up to `until`, then breaks the connection (None: streams all), or refuses with `error`, or (once it
    has shown a heartbeat) falls `silent`."""

    def __init__(
        self, *, until: int | None = None, error: SeqMTPError | None = None, skip: int = 0, silent: bool = False
    ) -> None:
        self.until, self.error, self.skip, self.silent = until, error, skip, silent
        self.requests: list[Any] = []
        self.num_probes = 0
        self.stopped = asyncio.Event()  # set: it runs
        self.stopped.set()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append((from_wire(Request, request.request), dict(request.meta)))
        await self.stopped.wait()
        async for message in self._rows(context):
            yield message

    async def Attach(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request.request_id)
        async for message in self._rows(context):
            yield message

    async def _rows(self, context: Any) -> AsyncIterator[Any]:
        if self.silent:
            yield HEARTBEAT
        for version in range(1 + self.skip, NUM_ROWS + 1):
            if self.silent and self.until is not None and version > self.until:
                await asyncio.Event().wait()  # as if stopped
            if self.error is not None and (self.until is None or version > self.until):
                await abort(context, self.error)
            if self.until is not None and version > self.until:
                self.until = None
                await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
            yield to_wire(row(version))

    async def Start(self, request: Any, context: Any) -> Any:
        self.requests.append(from_wire(Request, request.request))
        await self.stopped.wait()
        return messages.Record(request=request.request, digest=initial_digest(REQUEST.prompt_ids))

    async def Owns(self, request: Any, context: Any) -> Any:
        self.num_probes += 1
        await self.stopped.wait()
        return messages.OwnsReply()

    async def Status(self, request: Any, context: Any) -> Any:
        return messages.StatusReply(
            coordinator_id="c", model="m", max_model_len=99, max_depth=2, target_ready=True, counters={"rounds": 4.0}
        )


class _Laned:
    """The context of a call of its own, as a lane of another call sees it."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared

    async def abort(self, code: grpc.StatusCode, details: str, trailers: Any = ()) -> None:
        for _, value in trailers:
            raise from_message(common.Error.FromString(value))
        await self._shared.abort(code, details)  # a broken connection is everybody's


async def lanes(self: Scripted, request_iterator: Any, context: Any) -> None:
    """As the product's, with the scripted calls in it."""
    broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def rows_of(opening: messages.LaneOpening) -> AsyncIterator[CommittedRow]:
        call = (
            self.Generate(opening.generate, own) if opening.HasField("generate") else self.Attach(opening.attach, own)
        )
        async with contextlib.aclosing(call) as found:  # type: ignore[type-var]
            async for message in found:
                if message.version:
                    num["told"] += 1
                    yield from_wire(CommittedRow, message)

    async def write(rows: messages.LaneRows) -> None:
        await context.write(rows)
        num["written"] += len(rows.rows)

    class Shared:
        @staticmethod
        async def abort(code: grpc.StatusCode, details: str) -> None:
            while num["written"] < num["told"]:
                await asyncio.sleep(0.001)
            if not broken.done():
                broken.set_exception(grpc.aio.AbortError())
            await asyncio.Event().wait()

    num = {"told": 0, "written": 0}
    own = _Laned(Shared)
    beat_s = 1e9 if self.silent or not self.stopped.is_set() else BEAT_S
    serving = asyncio.create_task(Lanes(rows_of, beat_s).serve(context.read, write))
    try:
        await asyncio.wait({serving, broken}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks(serving)
        broken.cancel()
    if not broken.cancelled():
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")


@pytest.fixture(params=["shared", "plain"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "shared":
        monkeypatch.setattr(Scripted, "Lanes", lanes)
    return str(request.param)


@contextlib.asynccontextmanager
async def coordinators(*servicers: Scripted, failover_s: float = 3.0) -> AsyncIterator[tuple[GrpcCoordinators, Any]]:
    """A client over one server for each servicer, in that order."""
    servers, addresses = [], []
    for servicer in servicers:
        server = new_server()
        coordinator_rpc.add_CoordinatorServicer_to_server(servicer, server)
        addresses.append(bind(server, "127.0.0.1", 0))
        await server.start()
        servers.append(server)
    directory = FixedDirectory(addresses)
    client = GrpcCoordinators(directory, failover_s=failover_s)
    try:
        yield client, directory
    finally:
        await client.close()
        await asyncio.gather(*(server.stop(None) for server in servers))


async def read(client: GrpcCoordinators, meta: dict[str, str] | None = None) -> list[CommittedRow]:
    return [row async for row in client.generate(REQUEST, meta or {})]


WHOLE = [row(version) for version in range(1, NUM_ROWS + 1)]


async def test_rows_come_as_they_were_committed_and_the_request_as_it_was_sent() -> None:
    only = Scripted()
    async with coordinators(only) as (client, _):
        assert await read(client, {"traceparent": "t"}) == WHOLE
    assert only.requests == [(REQUEST, {"traceparent": "t"})]


@pytest.mark.parametrize("until", [1, 3, 5])
async def test_a_broken_connection_is_opened_again_at_the_same_coordinator(until: int) -> None:
    only, other = Scripted(until=until), Scripted()
    async with coordinators(only, other) as (client, _):
        assert await read(client) == WHOLE
    assert (len(only.requests), len(other.requests)) == (2, 0)


async def test_a_dead_coordinators_stream_goes_on_at_another() -> None:
    dead = Scripted(until=2)
    async with coordinators(dead, Scripted()) as (client, directory):
        rows = client.generate(REQUEST, {})
        got = [await anext(rows), await anext(rows)]
        directory.listed = directory.listed[1:]  # its lease lapsed
        got += [row async for row in rows]
    assert got == WHOLE


async def test_a_stream_waits_for_a_coordinator_to_come_back() -> None:
    async with coordinators(Scripted(until=2), failover_s=30.0) as (client, directory):
        rows = client.generate(REQUEST, {})
        got = [await anext(rows), await anext(rows)]
        listed, directory.listed = directory.listed, ()

        async def come_back() -> None:
            await asyncio.sleep(0.5)
            directory.listed = listed

        back = asyncio.create_task(come_back())
        got += [row async for row in rows]
        await back
    assert got == WHOLE


async def test_a_coordinator_that_is_ending_sends_the_stream_on_at_once() -> None:
    ending, other = Scripted(until=2, error=Draining("another one goes on")), Scripted()
    async with coordinators(ending, other) as (client, _):
        assert await read(client) == WHOLE
    assert (len(ending.requests), len(other.requests)) == (1, 1)  # it was not asked again
    async with coordinators(ending) as (client, _):  # there is no other: its own word
        with pytest.raises(Draining, match="another one goes on"):
            await read(client)


async def test_a_silent_coordinator_is_left_for_another() -> None:
    stopped, other = Scripted(until=2, silent=True), Scripted()
    async with coordinators(stopped, other) as (client, _):
        assert await read(client) == WHOLE
    assert (len(stopped.requests), len(other.requests)) == (1, 1)


def stopped() -> Scripted:
    """Takes every call, and answers none."""
    servicer = Scripted()
    servicer.stopped.clear()
    return servicer


async def test_a_coordinator_that_is_stopped_before_the_first_row_is_left_for_another() -> None:
    first, other = stopped(), Scripted()
    async with coordinators(first, other) as (client, _), asyncio.timeout(30):  # for ever, if nobody asked it
        assert await read(client) == WHOLE
    assert first.requests == other.requests  # the same request: whoever is second finds the first one's record


async def test_a_request_is_started_elsewhere_when_its_coordinator_is_stopped() -> None:
    first, other = stopped(), Scripted()
    async with coordinators(first, other) as (client, _), asyncio.timeout(30):  # for ever, if nobody asked it
        many = [client.start(REQUEST, {}) for _ in range(10)]
        assert {record.request for record in await asyncio.gather(*many)} == {REQUEST}
    assert first.num_probes == 1, "it is asked once, however many wait"
    assert len(other.requests) == 10


async def test_a_coordinator_that_is_slow_but_alive_is_waited_for() -> None:
    slow, other = Scripted(), Scripted()
    slow.Owns = other.Owns  # type: ignore[method-assign]
    slow.stopped.clear()
    async with coordinators(slow, other) as (client, _):
        starting = asyncio.create_task(client.start(REQUEST, {}))
        while other.num_probes < 3:
            await asyncio.sleep(0.01)
        slow.stopped.set()
        assert (await starting).request == REQUEST
    assert other.requests == []


async def test_when_all_are_silent_each_is_asked_again_with_patience() -> None:
    first, other = stopped(), stopped()
    async with coordinators(first, other) as (client, _):
        starting = asyncio.create_task(client.start(REQUEST, {}))
        while len(first.requests) + len(other.requests) < 3:
            await asyncio.sleep(0.01)
        first.stopped.set()
        other.stopped.set()
        assert (await starting).request == REQUEST


async def test_a_coordinator_without_heartbeats_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.row_streams.SILENCE_S", 0.0)
    async with coordinators(Scripted()) as (client, _):
        assert await read(client) == WHOLE


async def test_the_wait_for_another_is_bounded() -> None:
    async with coordinators(Scripted(until=2), failover_s=0.3) as (client, directory):
        rows = client.generate(REQUEST, {})
        await anext(rows)
        await anext(rows)
        directory.listed = ()
        with pytest.raises(NotReady):
            await anext(rows)


async def test_before_the_first_row_each_is_tried_once() -> None:
    full, free = Scripted(error=Overloaded("full")), Scripted()
    async with coordinators(full, free) as (client, _):
        assert await read(client) == WHOLE
    async with coordinators(full, full) as (client, _):
        with pytest.raises(Overloaded, match="full"):
            await read(client)
    async with coordinators() as (client, directory):
        with pytest.raises(NotReady):
            await read(client)
        directory.listed = ("127.0.0.1:1",)
        with pytest.raises(NotReady):
            await read(client)
        assert await client.status() == []


async def test_a_coordinators_own_error_ends_the_stream() -> None:
    failing, other = Scripted(until=2, error=NotReady("no target came back")), Scripted()
    async with coordinators(failing, other) as (client, _):
        rows = client.generate(REQUEST, {})
        await anext(rows)
        await anext(rows)
        with pytest.raises(Unavailable, match="no target came back"):
            await anext(rows)
    assert other.requests == []


async def test_a_missing_row_is_never_passed_over() -> None:
    async with coordinators(Scripted(skip=1), failover_s=0.3) as (client, _):
        with pytest.raises(StaleVersion, match="row 2 after row 0"):
            await read(client)


async def test_status_speaks_for_those_that_answer() -> None:
    async with coordinators(Scripted(), Scripted()) as (client, directory):
        directory.listed = (*directory.listed, "127.0.0.1:1")
        statuses = await client.status()
    assert [(status.model, status.max_model_len, status.counters["rounds"]) for status in statuses] == [
        ("m", 99, 4.0)
    ] * 2
    assert not statuses[0].ready  # its store is not
