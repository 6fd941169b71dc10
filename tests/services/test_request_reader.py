"""Readers, starts and scans at one coordinator while another owns the request, dies, or never hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from seqmtp_serve.errors import Draining, Overloaded, RequestNotFound, StoreBehind, Unavailable
from seqmtp_serve.fake import fake_text
from seqmtp_serve.frontier.row_chain import RowChain
from seqmtp_serve.request import CommittedRow, FinishReason, Request
from services.coordinator.leases import hand_back
from services.store.embedded import EmbeddedValkey
from services.store.pressure import StorePressure
from tests.services.coordinators import Node, a_request, nodes


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    folder: Path = tmp_path_factory.mktemp("valkey")
    with EmbeddedValkey(folder) as running:
        yield running


def assert_exactly_once(request: Request, rows: list[CommittedRow]) -> None:
    assert_follows(request, rows)
    assert [row.version for row in rows] == list(range(1, len(rows) + 1))
    assert tuple(token for row in rows for token in row.tokens) == fake_text(request)
    assert [row.finish is not None for row in rows] == [False] * (len(rows) - 1) + [True]


def assert_follows(request: Request, rows: list[CommittedRow]) -> None:
    """Each says its place, whoever committed it and wherever it was read."""
    chain = RowChain(request)
    for row in rows:
        chain.take(row)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_coordinator_that_hands_over_is_gone_on_for_at_once(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a", "b") as (a, b):
        request = a_request("r", max_tokens=3000)  # long, so that it is not done before it is handed over
        await a.begin(request)
        async with aclosing(a.attach("r")) as reading:
            seen = [await anext(reading) for _ in range(5)]
            a.driver.retire()
            with pytest.raises(Draining):
                [row async for row in a.generate(a_request("new"))]
            seen.append(await anext(reading))  # what it has goes on
            owned = a.driver.owned()
            await a.driver.close()
            await hand_back(owned, a.store)
            with pytest.raises(Draining, match="another one goes on"):
                seen += [row async for row in reading]
        record = await a.store.unfinished("r")
        assert record is not None
        assert record.lease_left_s <= 0  # nobody needs to wait for it to lapse
        rows = [row async for row in b.attach("r")]
        assert_exactly_once(request, rows)
        assert rows[: len(seen)] == seen
        assert await epoch_of(b, "r") == 2


async def epoch_of(node: Node, request_id: str) -> int:
    snapshot = await node.store.snapshot(request_id)
    assert snapshot is not None
    return snapshot.epoch


@pytest.mark.covers(85)
async def test_a_reader_elsewhere_follows_and_takes_nothing_over(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a", "b") as (a, b):
        request = a_request("r")
        await a.begin(request)
        rows = [row async for row in b.attach("r")]
        assert_exactly_once(request, rows)
        assert await epoch_of(a, "r") == 1
        assert [row async for row in b.attach("r", 5)] == rows[5:]
        with pytest.raises(RequestNotFound):
            [row async for row in b.attach("unknown")]


async def test_a_second_start_joins_wherever_it_comes(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a", "b") as (a, b):
        request = a_request("r")
        first = await a.begin(request, answer="the first")
        again = await b.begin(a_request("r", max_tokens=7), answer="another")
        assert dict(first.meta) == dict(again.meta) == {"answer": "the first"}
        assert again.request.params.max_tokens == 300
        here = [row async for row in a.generate(request)]
        there = [row async for row in b.generate(request)]
        assert here == there
        assert_exactly_once(request, here)
        assert await epoch_of(a, "r") == 1


@pytest.mark.covers(85, 88)
async def test_a_dead_coordinators_request_is_taken_over_by_who_is_asked_for_it(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a", "b") as (a, b):
        request, seen = a_request("r"), []
        with pytest.raises(Unavailable):
            async with aclosing(a.generate(request)) as rows:
                async for row in rows:
                    seen.append(row)
                    if len(seen) == 5:
                        await a.kill()
        taken = [row async for row in b.attach("r")]
        assert taken[: len(seen)] == seen
        assert_exactly_once(request, taken)
        assert await epoch_of(b, "r") == 2
        await until(lambda: not b.target.held)


@pytest.mark.covers(85, 88)
async def test_a_follower_goes_on_when_the_owner_dies(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a", "b") as (a, b):
        request, seen = a_request("r", max_tokens=1000), []  # long: the owner is ahead of who follows it
        await a.begin(request)
        async for row in b.attach("r"):
            seen.append(row)
            if len(seen) == 5:
                await a.kill()
        assert_exactly_once(request, seen)
        assert await epoch_of(b, "r") == 2
        assert {row.epoch for row in seen} == {1, 2}, "of whoever committed it"


@pytest.mark.parametrize("taken_over", [False, True])
async def test_the_end_of_a_record_without_a_row_follows_wherever_it_is_read(
    valkey: EmbeddedValkey, taken_over: bool
) -> None:
    async with nodes(valkey, "a", "b", delay_s=0.01) as (a, b):
        request = a_request("r", max_tokens=3000)
        await a.begin(request)
        epochs = {1}
        if taken_over:
            async for row in a.attach("r"):
                if row.version == 3:
                    break
            await b.driver.submit(request)
            epochs = {1, 2}
        owner, other = (b, a) if taken_over else (a, b)

        async def read(node: Node) -> list[CommittedRow]:
            return [row async for row in node.attach("r")]

        reading = [asyncio.create_task(read(node)) for node in (owner, other)]
        async with asyncio.timeout(60):
            async for row in owner.attach("r"):
                if row.version == 12:
                    break
        assert await owner.driver.cancel("r")
        here, followed = await asyncio.gather(*reading)
        for rows in (here, followed, await read(owner), await read(other)):
            assert_follows(request, rows)
            assert (rows[-1].tokens, rows[-1].finish) == ((), FinishReason.CANCELLED)
            assert {row.epoch for row in rows} == epochs
            assert [row.digest for row in rows] == [row.digest for row in here]


async def test_readers_of_a_fenced_owner_go_on_with_the_new_one(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a", "b") as (a, b):
        request, seen = a_request("r"), []
        async for row in a.generate(request):
            seen.append(row)
            if len(seen) == 5:
                await b.driver.submit(request)  # as after a pause that looked like death
        assert_exactly_once(request, seen)
        await until(lambda: not a.target.held)


async def test_a_reader_through_another_coordinator_keeps_the_request_alive(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a", "b", grace_s=1.0, delay_s=0.01) as (a, b):
        request, seen = a_request("r", max_tokens=1000), []
        await a.begin(request)
        async with aclosing(b.attach("r")) as rows:
            async for row in rows:
                seen.append(row)
                if len(seen) == 150:
                    break
        rest = [row async for row in b.store.follow("r", len(seen))]  # nobody reads through a coordinator any more
        assert rest[-1].finish is FinishReason.CANCELLED
        await until(lambda: not a.target.held)


async def test_who_leaves_while_it_follows_leaves_nothing_behind(
    valkey: EmbeddedValkey, caplog: pytest.LogCaptureFixture
) -> None:
    async with nodes(valkey, "a", "b", delay_s=0.05) as (a, b):
        await a.begin(a_request("r", max_tokens=3000), background="1")
        async with aclosing(b.attach("r")) as rows:
            for _ in range(3):
                await anext(rows)
        await until(lambda: not b.store._follower._cursors)
        assert a.driver.is_live("r"), "its end is not what ended the reading"
    assert "already running" not in caplog.text


async def test_background_requests_need_no_reader(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a", grace_s=0.02) as (a,):
        await a.begin(a_request("left"))
        await a.begin(a_request("background"), background="1")
        left = [row async for row in a.store.follow("left")]
        kept = [row async for row in a.store.follow("background")]
        assert left[-1].finish is FinishReason.CANCELLED
        assert_exactly_once(a_request("background"), kept)
        await until(lambda: not a.target.held)


@pytest.mark.covers(85, 88)
async def test_the_scan_goes_on_with_what_a_dead_coordinator_left(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a", "b", grace_s=0.3) as (a, b):
        background = a_request("background", max_tokens=2000)
        await a.begin(background, background="1")
        await a.begin(a_request("unread", max_tokens=3000))
        await b.begin(a_request("ours", max_tokens=2000))
        await a.kill()
        await a.forgotten()
        before = await epoch_of(b, "ours")
        assert await b.scan.scan()
        assert b.driver.is_live("background")
        assert b.driver.is_live("unread")
        assert_exactly_once(background, [row async for row in b.store.follow("background")])
        assert [row async for row in b.store.follow("unread")][-1].finish is FinishReason.CANCELLED
        assert await epoch_of(b, "ours") == before
        await b.driver.cancel("ours")
        assert [record async for record in b.store.all_unfinished()] == []


async def test_the_scan_leaves_living_owners_alone_and_tries_again_without_a_target(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a", "b") as (a, b):
        await a.begin(a_request("r", max_tokens=1000))
        await b.scan.scan()
        assert a.driver.is_live("r")
        assert not b.driver.is_live("r")
        await a.kill()
        await a.forgotten()
        b.driver.scheduler.info = None  # no target was ever seen
        assert not await b.scan.scan()
        b.driver.scheduler.info = await b.target.info()
        assert await b.scan.scan()
        assert b.driver.is_live("r")


async def test_a_record_behind_a_reader_is_named_unless_its_owner_has_the_rows(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a", "b") as (a, b):
        await a.begin(a_request("r"))
        await a.kill()
        version = 10**6
        with pytest.raises(StoreBehind):
            [row async for row in b.attach("r", version)]
        assert_exactly_once(a_request("r"), [row async for row in b.attach("r")])  # it was gone on with


async def test_a_full_store_turns_newcomers_away_with_a_time_to_come_back(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a") as (a,):
        full = StorePressure(a.store.redis, limit_bytes=1000, window_s=600.0)
        full.check()  # nothing is known yet
        await full.read()
        with pytest.raises(Overloaded, match="up to 1000") as told:
            full.check()
        assert told.value.retry_after_s > 1.0
        a.servicer._admit = full.check
        with pytest.raises(Overloaded) as refused:
            [row async for row in a.generate(a_request("r"))]
        assert refused.value.retry_after_s == told.value.retry_after_s  # it crossed the wire
        assert await a.store.snapshot("r") is None
        roomy = StorePressure(a.store.redis, limit_bytes=None, window_s=600.0)
        await a.store.redis.config_set("maxmemory", 0)
        await roomy.read()
        roomy.check()
        await a.store.redis.config_set("maxmemory", 2**40)
        await roomy.read()
        assert roomy.limit_bytes == pytest.approx(0.9 * 2**40, rel=1e-6)
        await a.store.redis.config_set("maxmemory", 0)
