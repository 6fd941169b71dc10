"""More than fits: refused before a stream begins, with a time to come back; what was taken ends, nothing is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from seqmtp_serve.errors import Overloaded
from seqmtp_serve.fake import fake_text
from seqmtp_serve.live_requests import CALLER, PRIORITY
from seqmtp_serve.request import CommittedRow, Request, SamplingParams
from services.store.embedded import EmbeddedValkey
from tests.services.coordinators import CONFIG, Node, a_request, nodes

BATCH = CONFIG.max_batch
SMALL = replace(CONFIG, max_waiting=8)


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(tmp_path_factory.mktemp("valkey")) as running:
        yield running


async def answer(node: Node, request: Request) -> list[CommittedRow] | Overloaded:
    try:
        return [row async for row in node.generate(request)]
    except Overloaded as refused:
        return refused


def assert_nothing_is_held(node: Node) -> None:
    status = node.driver.status()
    node.servicer._audience.check()
    assert (status.running, status.waiting, status.gauges["requests_live"]) == (0, 0, 0)
    assert status.gauges["pages_held"] == 0


async def idle(node: Node) -> None:
    """Until the target has been told of every release."""
    async with asyncio.timeout(20):
        while node.target.held or len(node.driver._requests):
            await asyncio.sleep(0.002)


async def test_a_spike_of_ten_times_the_room_is_survived(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a", config=SMALL, delay_s=0.001) as (node,):
        room = BATCH + SMALL.max_waiting
        asked = [a_request(f"r{number}", max_tokens=40) for number in range(10 * room)]
        answers = await asyncio.gather(*(answer(node, request) for request in asked))
        refused = [one for one in answers if isinstance(one, Overloaded)]
        served = [
            (request, one) for request, one in zip(asked, answers, strict=True) if not isinstance(one, Overloaded)
        ]
        assert len(served) >= room
        assert len(refused) >= 5 * room
        assert all(1 <= one.retry_after_s <= 60 for one in refused)
        for request, rows in served:
            assert tuple(token for row in rows for token in row.tokens) == fake_text(request)
        await idle(node)
        assert_nothing_is_held(node)
        after = await answer(node, a_request("after", max_tokens=40))
        assert not isinstance(after, Overloaded), "room again, at once"


async def test_a_storm_of_cancellations_leaves_nothing(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a", delay_s=0.001) as (node,):
        requests = [a_request(f"r{number}") for number in range(40)]
        await asyncio.gather(*(node.begin(request) for request in requests))
        await asyncio.gather(*(node.driver.cancel(request.request_id) for request in (*requests, *requests)))
        await idle(node)
        assert_nothing_is_held(node)
        rows = await answer(node, a_request("after", max_tokens=20))
        assert not isinstance(rows, Overloaded)
        assert rows[-1].finish is not None


async def test_a_storm_of_hang_ups_leaves_nothing(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a", delay_s=0.001, grace_s=0.01) as (node,):

        async def hang_up(request: Request) -> None:
            async for _ in node.generate(request):
                return

        await asyncio.gather(*(hang_up(a_request(f"r{number}")) for number in range(30)))
        await idle(node)
        assert_nothing_is_held(node)


async def test_queued_tokens_are_bounded_but_an_empty_queue_takes_anything(valkey: EmbeddedValkey) -> None:
    bounded = replace(CONFIG, max_waiting_tokens=100)
    async with nodes(valkey, "a", config=bounded, delay_s=0.02) as (node,):

        def long(name: str, num_tokens: int) -> Request:
            return Request(request_id=name, prompt_ids=(3,) * num_tokens, params=SamplingParams(max_tokens=200))

        for number in range(BATCH):
            await node.begin(long(f"running{number}", 150))
            async with asyncio.timeout(20):
                while node.driver.status().waiting:
                    await asyncio.sleep(0.002)
        await node.begin(long("first", 90))
        assert node.driver.status().gauges["waiting_tokens"] == 90
        with pytest.raises(Overloaded, match="tokens wait"):
            await node.driver.submit(long("second", 20))
        await node.begin(long("small", 10))
        assert node.driver.status().waiting == 2


async def test_a_reader_that_does_not_read_holds_nobody_up(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a", delay_s=0.0) as (node,):
        slow = node.generate(a_request("slow", max_tokens=2000))
        assert (await anext(slow)).version == 1
        rows = await answer(node, a_request("quick", max_tokens=50))
        assert not isinstance(rows, Overloaded)
        rest = [row async for row in slow]
        assert [row.version for row in rest] == list(range(2, len(rest) + 2))


@pytest.mark.parametrize("label", [{CALLER: "few"}, {CALLER: "many", PRIORITY: "-1"}], ids=["a turn", "priority"])
async def test_a_flood_does_not_hold_up_who_is_to_go_first(valkey: EmbeddedValkey, label: dict[str, str]) -> None:
    """Through coordinator, driver and store: one caller's forty requests, then one with this label."""
    async with nodes(valkey, "a", delay_s=0.005) as (node,):
        flood = [a_request(f"r{number}", max_tokens=40) for number in range(10 * BATCH)]
        for request in flood:
            await node.begin(request, **{CALLER: "many"})
        late = a_request("late", max_tokens=40)
        await node.begin(late, **label)
        waiting = node.driver.status().waiting
        ended: list[str] = []

        async def read(name: str) -> None:
            async for _ in node.attach(name):
                pass
            ended.append(name)

        await asyncio.gather(*(read(request.request_id) for request in (*flood, late)))
        assert waiting > 2 * BATCH, "there was a queue to stand in"
        assert len(flood) - ended.index("late") > waiting - 2 * BATCH
