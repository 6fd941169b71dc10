"""More than fits: refused before a stream begins, with a time to come back; what was taken ends, nothing is kept."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import httpx
import pytest

from seqmtp_serve.errors import Overloaded
from seqmtp_serve.fake import fake_text
from seqmtp_serve.live_requests import CALLER, PRIORITY
from seqmtp_serve.ports import StepPlan, StepReport
from seqmtp_serve.request import CommittedRow, Request, SamplingParams
from services.gateway.directory import FixedDirectory
from services.gateway.grpc_coordinators import GrpcCoordinators
from services.process_levels import num_open_files, num_tasks
from services.store.embedded import EmbeddedValkey
from tests.services.coordinators import CONFIG, Node, a_request, nodes
from tests.services.gateway.live import serving
from tests.services.gateway.world import CHAT, MESSAGES

BATCH = CONFIG.max_batch
SMALL = replace(CONFIG, max_waiting=8)
POOLED = 64  # connections to the store: more than so many clients need at once


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


def hold(node: Node) -> asyncio.Event:
    """From now on its target answers no step, until the event is set."""
    free, step = asyncio.Event(), node.target.step

    async def held(plan: StepPlan) -> StepReport:
        await free.wait()
        return await step(plan)

    node.target.step = held
    return free


async def idle(node: Node) -> None:
    """Until the target has been told of every release."""
    async with asyncio.timeout(20):
        while node.target.held or len(node.driver._requests):
            await asyncio.sleep(0.002)


async def test_a_spike_of_ten_times_the_room_is_survived(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a", config=SMALL, delay_s=0.001) as (node,):
        room = BATCH + SMALL.max_waiting
        asked = [a_request(f"r{number}", max_tokens=40) for number in range(10 * room)]
        free = hold(node)
        reading = [asyncio.create_task(answer(node, request)) for request in asked]
        while sum(one.done() for one in reading) < 5 * room:  # refused: nothing has ended yet
            await asyncio.sleep(0.002)
        free.set()
        answers = await asyncio.gather(*reading)
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


async def storm(url: str, num_clients: int, rng: Random) -> None:
    """Clients that read a few events each and are gone, from answers of one choice and of several."""

    async def hang_up(client: httpx.AsyncClient, num_events: int, num_choices: int) -> None:
        body = {"messages": MESSAGES, "n": num_choices, "max_tokens": 400, "ignore_eos": True, "stream": True}
        async with client.stream("POST", url + CHAT, json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            events = answer.aiter_lines()
            for _ in range(num_events):
                await anext(events)

    async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=None)) as client:
        await asyncio.gather(*(hang_up(client, rng.randint(0, 9), rng.randint(1, 2)) for _ in range(num_clients)))


async def held_above(tasks: int, open_files: int, *, within_s: float = 20.0) -> tuple[int, int]:
    """How many more tasks and open files there are, once there are none, or time is up."""
    until = asyncio.get_running_loop().time() + within_s
    while True:
        gc.collect()
        above = max(0, num_tasks() - tasks), max(0, num_open_files() - open_files)
        if above == (0, 0) or asyncio.get_running_loop().time() > until:
            return above
        await asyncio.sleep(0.05)


async def test_a_storm_of_disconnects_leaves_no_task_and_no_open_file(valkey: EmbeddedValkey) -> None:
    """Gateway, coordinators and their clients of the store in one process: everything that could be left is counted."""
    rng = Random(5)
    async with nodes(valkey, "a", "b", delay_s=0.001, grace_s=1.0) as (a, b):
        coordinators = GrpcCoordinators(FixedDirectory([a.address, b.address]))
        async with serving(coordinators) as url:
            await storm(url, 30, rng)  # opens what others need, too
            await asyncio.gather(*(node.store.ping() for node in (a, b) for _ in range(POOLED)))
            await asyncio.gather(idle(a), idle(b))
            await held_above(0, 0, within_s=1.0)
            before = num_tasks(), num_open_files()
            for _ in range(2):
                await storm(url, 25, rng)
            await asyncio.gather(idle(a), idle(b))
            tasks, open_files = before
            assert await held_above(tasks, open_files) == (0, 0)
            for node in (a, b):
                assert_nothing_is_held(node)
                assert node.driver.status().counters["finished.cancelled"] > 0


async def test_queued_tokens_are_bounded_but_an_empty_queue_takes_anything(valkey: EmbeddedValkey) -> None:
    bounded = replace(CONFIG, max_waiting_tokens=100)
    async with nodes(valkey, "a", config=bounded, delay_s=0.02) as (node,):

        def long(name: str, num_tokens: int) -> Request:
            return Request(request_id=name, prompt_ids=(3,) * num_tokens, params=SamplingParams(max_tokens=3000))

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
        free = hold(node)
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

        reading = [asyncio.create_task(read(request.request_id)) for request in (*flood, late)]
        while node.servicer._audience.num_readers < len(reading):
            await asyncio.sleep(0.002)
        free.set()
        await asyncio.gather(*reading)
        assert waiting > 2 * BATCH, "there was a queue to stand in"
        assert len(flood) - ended.index("late") > waiting - 2 * BATCH
