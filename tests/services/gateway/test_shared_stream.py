"""Rows of many requests in one call are those of a call for each: same rows, same ends, whatever else goes on in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

import grpc
import pytest

from seqmtp_serve.errors import ProtocolError, Unavailable
from seqmtp_serve.request import CommittedRow
from seqmtp_serve.tasks import end_tasks
from services.coordinator import lanes
from services.coordinator.lanes import Lanes
from services.gateway.attempts import Silent
from services.gateway.shared_stream import WINDOW, Lane, SharedStream
from services.rpc.convert import from_wire
from services.rpc.heartbeat import BEAT_S, SILENCE_S
from services.rpc.wire import coordinator as messages
from tests.chaos.simulation.virtual_loop import VirtualLoop
from tests.services.gateway.row_histories import History, Seen, Source, at_once, expected, histories, read

# What a call that was cut ends with: INTERNAL is gRPC's own word when a write meets the cut first.
LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED)


class Wire:
    """A call between two ends in one process: messages are copied, late, and in order. `hold` keeps them back."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._there: asyncio.Queue[bytes] = asyncio.Queue()
        self._back: asyncio.Queue[bytes] = asyncio.Queue()
        self._broken = asyncio.Event()
        self.flows = asyncio.Event()
        self.flows.set()
        self.serving: asyncio.Task[None] | None = None
        self.sizes: list[tuple[int, int]] = []  # rows and bytes of each message from the coordinator

    async def read(self) -> Any:
        """At the gateway."""
        found = await self._unless_broken(self._back)
        return grpc.aio.EOF if found is None else messages.LaneRows.FromString(found)

    async def write(self, orders: messages.LaneOrders) -> None:
        """At the gateway."""
        await self._carry(self._there, orders.SerializeToString())

    def cancel(self) -> None:
        """At the gateway: the other end hears of it."""
        self._broken.set()
        if self.serving is not None:
            self.serving.cancel()

    async def take(self) -> Any:
        """At the coordinator."""
        return messages.LaneOrders.FromString(await self._there.get())

    async def give(self, rows: messages.LaneRows) -> None:
        """At the coordinator."""
        self.sizes.append((len(rows.rows), rows.ByteSize()))
        await self._carry(self._back, rows.SerializeToString())

    def hold(self) -> None:
        self.flows.clear()

    async def _carry(self, queue: asyncio.Queue[bytes], data: bytes) -> None:
        await self.flows.wait()
        await asyncio.sleep(self._rng.choice([0.0, 0.0, self._rng.uniform(0, 0.004)]))
        queue.put_nowait(data)

    async def _unless_broken(self, queue: asyncio.Queue[bytes]) -> bytes | None:
        getting, broken = asyncio.ensure_future(queue.get()), asyncio.ensure_future(self._broken.wait())
        over = {getting, broken} | ({self.serving} if self.serving is not None else set())
        try:
            await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                return getting.result()
            if broken.done():
                raise grpc.aio.AioRpcError(self._rng.choice(LOST), grpc.aio.Metadata(), grpc.aio.Metadata(), "cut")
            return None
        finally:
            await end_tasks(getting, broken)


class Pair:
    """Both ends of one call, over a source of rows."""

    def __init__(self, rng: Random, source: Source) -> None:
        self.wire = Wire(rng)
        self.lanes = Lanes(lambda opening: source.rows(opening.attach.request_id, opening.attach.after_version))
        self.wire.serving = asyncio.create_task(self.lanes.serve(self.wire.take, self.wire.give))
        self.stream = SharedStream("here", self.wire)

    def open(self, name: str) -> Lane:
        return self.stream.open(messages.AttachRequest(request_id=name))

    async def rows(self, name: str) -> AsyncGenerator[CommittedRow, None]:
        lane = self.open(name)
        try:
            while (message := await lane.read()) is not grpc.aio.EOF:
                yield from_wire(CommittedRow, message)
        finally:
            lane.cancel()

    async def read(self, history: History) -> Seen:
        async with aclosing(self.rows(history.request_id)) as rows:
            return await read(history, rows)


@asynccontextmanager
async def pair(rng: Random, source: Source) -> AsyncIterator[Pair]:
    """At the end nobody reads, and nothing of it goes on."""
    before = asyncio.all_tasks()
    both = Pair(rng, source)
    yield both
    await both.stream.close()
    assert both.wire.serving is not None
    await end_tasks(both.wire.serving)
    await asyncio.sleep(0)
    assert source.num_open == 0
    assert asyncio.all_tasks() == before


@pytest.fixture
def virtual() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        yield runner


@pytest.mark.parametrize("seed", range(150))
def test_each_reader_gets_what_it_would_alone(virtual: asyncio.Runner, seed: int) -> None:
    async def run() -> None:
        rng = Random(seed)
        found = histories(rng)
        right = [await expected(history, Source(found, Random(seed))) for history in found]
        source = Source(found, rng)
        async with pair(rng, source) as both:
            assert await asyncio.gather(*map(both.read, found)) == right

    virtual.run(run())


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("how", ["the connection breaks", "the coordinator closes"])
def test_when_the_call_is_lost_each_has_rows_in_order_and_knows(virtual: asyncio.Runner, seed: int, how: str) -> None:
    async def run() -> None:
        rng = Random(seed)
        found = histories(rng)
        right = [await expected(history, Source(found, Random(seed))) for history in found]
        source = Source(found, rng)
        async with pair(rng, source) as both:
            reading = [asyncio.create_task(both.read(history)) for history in found]
            await asyncio.sleep(rng.uniform(0, 0.1))
            if how == "the connection breaks":
                both.wire.cancel()
            elif both.wire.serving is not None:
                both.wire.serving.cancel()
            for seen, whole in zip(await asyncio.gather(*reading), right, strict=True):
                assert seen.rows == whole.rows[: len(seen.rows)]
                assert seen == whole or seen.end.startswith(Unavailable.code)
            async with asyncio.timeout(1.0):
                while both.stream.is_open:
                    await asyncio.sleep(0.001)

    virtual.run(run())


def test_a_reader_that_reads_nothing_is_sent_its_window_and_holds_nobody_up(virtual: asyncio.Runner) -> None:
    async def run() -> None:
        source = Source([at_once("slow", 200), at_once("quick", 200)], Random(2))
        async with pair(Random(3), source) as both:
            slow = both.open("slow")
            quick = [row async for row in both.rows("quick")]
            assert len(quick) == 200
            await asyncio.sleep(5.0)
            assert source.num_given["slow"] == WINDOW + 1, "the one that waits for room was taken from the source"
            taken = [from_wire(CommittedRow, await slow.read()).version for _ in range(200)]
            assert taken == list(range(1, 201))

    virtual.run(run())


def test_rows_that_are_there_together_travel_together(virtual: asyncio.Runner) -> None:
    async def run() -> None:
        names = [f"r{number}" for number in range(50)]
        source = Source([at_once(name, 200) for name in names], Random(2))
        async with pair(Random(3), source) as both:
            both.wire.hold()
            lanes = [both.open(name) for name in names]
            both.wire.flows.set()
            for lane in lanes:
                await lane.read()
            assert len(both.wire.sizes) <= 3

    virtual.run(run())


def test_a_message_has_its_bound_and_a_row_above_it_one_of_its_own(
    virtual: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "FULL_BYTES", 600)

    async def run() -> None:
        small, large = at_once("small", 100), at_once("large", 100)
        rows = tuple(replace(row, origins="a" * 700) if row.version % 3 == 0 else row for row in large.rows)
        found = [small, replace(large, rows=rows)]
        async with pair(Random(3), Source(found, Random(2))) as both:
            seen = await asyncio.gather(*map(both.read, found))
            assert [one.rows for one in seen] == [one.rows for one in found]
            framing = 8  # bytes at most for each row: a tag, a length, and the number of its lane
            assert all(num_bytes <= 600 + framing * num for num, num_bytes in both.wire.sizes if num > 1)
            assert sum(num == 1 and num_bytes > 700 for num, num_bytes in both.wire.sizes) == 33

    virtual.run(run())


def test_lanes_that_have_begun_hear_of_silence_and_others_wait(virtual: asyncio.Runner) -> None:
    async def run() -> None:
        source = Source([at_once("begun", 200), at_once("later", 200)], Random(2))
        async with pair(Random(3), source) as both:
            begun = both.open("begun")
            await begun.read()
            for _ in range(20):  # it reads nothing, and yet nobody is silent
                await asyncio.sleep(BEAT_S)
            both.wire.hold()
            later = both.open("later")
            at = asyncio.get_running_loop().time()
            with pytest.raises(Silent):
                while True:
                    await begun.read()
            waited_s = asyncio.get_running_loop().time() - at
            assert SILENCE_S - BEAT_S <= waited_s <= SILENCE_S + 2 * BEAT_S
            reading = asyncio.create_task(later.read())
            await asyncio.sleep(2 * SILENCE_S)
            assert not reading.done()
            both.wire.flows.set()
            assert (await reading).version == 1

    virtual.run(run())


def test_no_heartbeat_without_a_lane(virtual: asyncio.Runner) -> None:
    async def run() -> None:
        async with pair(Random(3), Source([at_once("r", 200)], Random(2))) as both:
            await asyncio.sleep(10.0)
            assert both.wire.sizes == [(0, 0)]

    virtual.run(run())


def test_a_call_that_is_closed_ends_with_its_last_lane(virtual: asyncio.Runner) -> None:
    async def run() -> None:
        async with pair(Random(3), Source([at_once("r", 200)], Random(2))) as both:
            lane = both.open("r")
            await lane.read()
            both.lanes.close()
            versions = [(await lane.read()).version for _ in range(199)]
            assert versions == list(range(2, 201))
            serving = both.wire.serving
            assert serving is not None
            async with asyncio.timeout(1.0):
                await serving

    virtual.run(run())


def test_nothing_is_ordered_before_the_call_is_served(virtual: asyncio.Runner) -> None:
    """Or the write could meet the refusal of who does not know the call, and gRPC say INTERNAL in its place."""

    async def run() -> None:
        source, served, written = Source([at_once("r", 5)], Random(2)), asyncio.Event(), list[Any]()

        class Call(Wire):
            async def read(self) -> Any:
                await served.wait()
                return await super().read()

            async def write(self, orders: messages.LaneOrders) -> None:
                written.append(orders)

        call = Call(Random(3))
        serving = asyncio.create_task(
            Lanes(lambda opening: source.rows("r", 0)).serve(call.take, call.give),
        )
        stream = SharedStream("here", call)
        stream.open(messages.AttachRequest(request_id="r"))
        await asyncio.sleep(1.0)
        assert written == []
        served.set()
        await asyncio.sleep(1.0)
        assert [opening.lane for orders in written for opening in orders.open] == [1]
        await stream.close()
        await end_tasks(serving)

    virtual.run(run())


def test_a_lane_number_is_used_once(virtual: asyncio.Runner) -> None:
    async def run() -> None:
        source = Source([at_once("r", 200)], Random(2))
        call = Lanes(lambda opening: source.rows("r", 0))
        opening = messages.LaneOpening(lane=1, attach=messages.AttachRequest(request_id="r"))
        orders = [messages.LaneOrders(open=[opening, opening])]

        async def take() -> Any:
            return orders.pop() if orders else await asyncio.Event().wait()

        async def give(rows: messages.LaneRows) -> None:
            pass

        with pytest.raises(ProtocolError, match="lane 1 is open already"):
            await call.serve(take, give)
        assert source.num_open == 0

    virtual.run(run())
