"""The rows of a request as a lane of the shared call and as a call of its own: over gRPC, at a real coordinator."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import grpc
import pytest

from seqmtp_serve.errors import Draining, InternalError, Unavailable
from seqmtp_serve.fake import fake_text
from seqmtp_serve.request import CommittedRow, TokenLogprobs
from services.coordinator import lanes
from services.coordinator.servicer import CoordinatorServicer
from services.gateway import row_streams
from services.gateway.directory import FixedDirectory
from services.gateway.grpc_coordinators import GrpcCoordinators
from services.gateway.pulse import Pulses
from services.gateway.row_streams import RowStreams
from services.gateway.shared_stream import WINDOW
from services.rpc.channel import connect
from services.rpc.convert import to_wire
from services.rpc.wire import coordinator as messages
from services.store.embedded import EmbeddedValkey
from tests.services.coordinators import Node, a_request, nodes
from tests.services.gateway.row_histories import History, Source, at_once, histories, read

REQUEST = a_request("r", max_tokens=40)


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(tmp_path_factory.mktemp("valkey")) as running:
        yield running


@contextlib.asynccontextmanager
async def readings(*, shared: bool) -> AsyncIterator[RowStreams]:
    """Over channels of their own."""
    channels: dict[str, grpc.aio.Channel] = {}

    def channel_to(address: str) -> grpc.aio.Channel:
        if address not in channels:
            channels[address] = connect(address)
        return channels[address]

    streams = RowStreams(channel_to, Pulses(channel_to), shared=shared)
    try:
        yield streams
    finally:
        await streams.close()
        await asyncio.gather(*(channel.close() for channel in channels.values()))


def attached(streams: RowStreams, node: Node, name: str) -> AsyncGenerator[CommittedRow, None]:
    wanted = messages.AttachRequest(request_id=name, heartbeats=True)
    return streams.rows(node.address, wanted, impatient=False)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of each kind that reach a coordinator."""
    counted: Counter[str] = Counter()

    def counting(name: str) -> Any:
        right = getattr(CoordinatorServicer, name)

        async def call(self: Any, request: Any, context: Any) -> Any:
            counted[name] += 1
            return await right(self, request, context)

        return call

    for name in ("Generate", "Attach", "Lanes"):
        monkeypatch.setattr(CoordinatorServicer, name, counting(name))
    return counted


@pytest.mark.parametrize("seed", range(8))
async def test_both_forms_give_the_same_of_the_same_histories(valkey: EmbeddedValkey, seed: int) -> None:
    """The call of its own is the oracle."""
    found = histories(Random(seed))
    seen = {}
    async with nodes(valkey, "a") as (node,):
        for shared in (False, True):
            source = Source(found, Random(seed))
            node.reader.rows = source.rows  # type: ignore[method-assign]

            async def one(history: History, streams: RowStreams) -> Any:
                async with contextlib.aclosing(attached(streams, node, history.request_id)) as rows:
                    got = await read(history, rows)
                return replace(got, end="internal_error") if got.end.startswith(InternalError.code) else got

            async with readings(shared=shared) as streams:
                seen[shared] = await asyncio.gather(*(one(history, streams) for history in found))
            async with asyncio.timeout(10):
                while source.num_open:
                    await asyncio.sleep(0.01)
    assert seen[True] == seen[False]


async def test_many_requests_are_one_call(valkey: EmbeddedValkey, called: Counter[str]) -> None:
    async with nodes(valkey, "a") as (node,):
        requests = [a_request(f"r{number}", max_tokens=60) for number in range(20)]
        texts = {}
        for shared in (True, False):
            client = GrpcCoordinators(FixedDirectory([node.address]), shared=shared)

            async def text(request: Any, client: GrpcCoordinators) -> tuple[int, ...]:
                return tuple([token async for row in client.generate(request, {}) for token in row.tokens])

            texts[shared] = await asyncio.gather(*(text(request, client) for request in requests))
            await client.close()
        assert texts[True] == texts[False] == [fake_text(request) for request in requests]
        assert called == {"Lanes": 1, "Generate": 20}
        node.servicer._audience.check()


async def test_a_coordinator_that_does_not_know_the_shared_call_is_asked_plainly_and_later_again(
    valkey: EmbeddedValkey, called: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known, is_known = CoordinatorServicer.Lanes, False

    async def upgraded(self: Any, request: Any, context: grpc.aio.ServicerContext) -> None:
        if not is_known:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not implemented!")
        await known(self, request, context)

    monkeypatch.setattr(CoordinatorServicer, "Lanes", upgraded)
    async with nodes(valkey, "a") as (node,):
        client = GrpcCoordinators(FixedDirectory([node.address]))
        assert [row.version async for row in client.generate(REQUEST, {})][-1] > 1
        assert [row.version async for row in client.attach(REQUEST)][-1] > 1
        assert called == {"Generate": 1, "Attach": 1}
        is_known = True
        monkeypatch.setattr(row_streams, "monotonic", lambda: 1e12)
        assert [row.version async for row in client.attach(REQUEST)][-1] > 1
        assert called == {"Generate": 1, "Attach": 1, "Lanes": 1}
        await client.close()


async def test_a_large_request_has_a_call_of_its_own(
    valkey: EmbeddedValkey, called: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_streams, "MAX_OPENING_BYTES", to_wire(REQUEST).ByteSize() + 10)
    async with nodes(valkey, "a") as (node,):
        client = GrpcCoordinators(FixedDirectory([node.address]))
        longer = replace(REQUEST, request_id="longer", prompt_ids=(3,) * 30)
        for request in (REQUEST, longer):
            tokens = [token async for row in client.generate(request, {}) for token in row.tokens]
            assert tuple(tokens) == fake_text(request)
        assert called == {"Lanes": 1, "Generate": 1}
        await client.close()


async def test_a_row_that_is_too_large_ends_its_own_lane(
    valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "MAX_ROW_BYTES", 2000)
    small, large = at_once("small", 100), at_once("large", 100)
    scores = (TokenLogprobs(logprob=-1.0, rank=1, top_ids=tuple(range(999)), top_logprobs=(-1.0,) * 999),)
    rows = (*large.rows[:50], replace(large.rows[50], logprobs=scores), *large.rows[51:])
    source = Source([small, replace(large, rows=rows)], Random(1))
    async with nodes(valkey, "a") as (node,), readings(shared=True) as streams:
        node.reader.rows = source.rows  # type: ignore[method-assign]
        whole, cut = await asyncio.gather(
            *(read(one, attached(streams, node, one.request_id)) for one in (small, large))
        )
        assert (whole.rows, whole.end) == (small.rows, "finish")
        assert cut.rows == large.rows[:50]
        assert cut.end.startswith(InternalError.code)


async def test_a_reader_that_does_not_read_holds_nobody_up(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a", delay_s=0.0) as (node,):
        client = GrpcCoordinators(FixedDirectory([node.address]))
        slow = client.generate(a_request("slow", max_tokens=2000), {})
        assert (await anext(slow)).version == 1
        quick = a_request("quick", max_tokens=50)
        tokens = [token async for row in client.generate(quick, {}) for token in row.tokens]
        assert tuple(tokens) == fake_text(quick)
        while node.driver.is_live("slow"):
            await asyncio.sleep(0.01)
        (stream,) = client._readings._shared.values()
        (lane,) = stream._lanes.values()
        assert len(lane._rows) == WINDOW - 1, "one is read, and no more than the window is sent"
        rest = [row async for row in slow]
        assert [row.version for row in rest] == list(range(2, len(rest) + 2))
        await client.close()


async def test_who_hangs_up_is_gone_and_the_others_read_on(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a", grace_s=0.01) as (node,):
        client = GrpcCoordinators(FixedDirectory([node.address]))
        stays = a_request("stays", max_tokens=200)
        staying = asyncio.ensure_future(_tokens(client, stays))
        async with contextlib.aclosing(client.generate(a_request("leaves", max_tokens=4000), {})) as leaving:
            await anext(leaving)
        async with asyncio.timeout(10):
            while node.driver.is_live("leaves"):
                await asyncio.sleep(0.005)
        assert await staying == fake_text(stays)
        assert node.driver.status().counters["finished.cancelled"] == 1
        node.servicer._audience.check()
        await client.close()


async def _tokens(client: GrpcCoordinators, request: Any) -> tuple[int, ...]:
    return tuple([token async for row in client.generate(request, {}) for token in row.tokens])


async def test_a_coordinator_that_hands_over_ends_its_lanes_and_then_the_call(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a") as (node,), readings(shared=True) as streams:
        await node.begin(a_request("r", max_tokens=4000))
        async with contextlib.aclosing(attached(streams, node, "r")) as rows:
            await anext(rows)
            node.servicer.close()
            await node.driver.close()
            with pytest.raises(Draining):
                async for _ in rows:
                    pass
        async with asyncio.timeout(5):  # far less than is given to calls under way
            await node._server.stop(60)
        with pytest.raises(Unavailable):
            await anext(attached(streams, node, "r"))
