"""The proposer service and the target's link to it, over a real loopback connection, with a scripted engine."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from seqmtp_serve.engine.proposer import Refusal
from seqmtp_serve.errors import AncestryMismatch
from seqmtp_serve.ports import Draft, FeedRows
from seqmtp_serve.request import Ref
from services.proposer.servicer import ProposerServicer
from services.proposer.worker import PassLoop
from services.rpc import channel
from services.rpc.wire import proposer, proposer_rpc
from services.target import draft_box, proposer_link
from services.target.proposer_link import GrpcProposer


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that comes is waited for, however busy the machine is; for one that cannot come nobody waits anyway."""
    monkeypatch.setattr(draft_box, "FLOOR_S", 30.0)
    monkeypatch.setattr(draft_box, "CEILING_S", 30.0)


class CountingEngine:
    """Drafts next_ids[-1] + 1, + 2, ...; refuses a feed of a sequence it does not hold."""

    def levels(self):
        return {}

    def __init__(self):
        self.sequences: dict[str, int] = {}

    @property
    def num_sequences(self) -> int:
        return len(self.sequences)

    num_held_pages = num_sequences

    def check(self) -> None:
        assert not self.sequences

    def propose(self, feeds: Sequence[FeedRows], closed: Sequence[str] = ()) -> list[Draft | Refusal]:
        for name in closed:
            self.sequences.pop(name, None)
        return [answer for rows in feeds if (answer := self._one(rows)) is not None]

    def _one(self, rows: FeedRows) -> Draft | Refusal | None:
        name, last = rows.ref.request_id, rows.next_ids[-1]
        if rows.reset:
            self.sequences[name] = 0
        if self.sequences.get(name) != rows.first_base:
            return Refusal(ref=rows.ref, code=AncestryMismatch.code, message="the rows do not follow")
        self.sequences[name] += len(rows.next_ids)
        return Draft(ref=rows.ref, tokens=tuple(last + 1 + i for i in range(rows.depth))) if rows.depth else None


class Service:
    """A proposer process' insides, that can be stopped and started again, on another port."""

    def __init__(self):
        self.address = ""
        self.engine = CountingEngine()

    async def start(self) -> None:
        self.engine = CountingEngine()
        self._passes = PassLoop(self.engine)
        self._running = asyncio.create_task(self._passes.run())
        self._server = channel.new_server()
        servicer = ProposerServicer(self._passes, proposer.ProposerInfo(proposer_id="p", hidden_size=4))
        proposer_rpc.add_ProposerServicer_to_server(servicer, self._server)
        self.address = channel.bind(self._server, "127.0.0.1", 0)
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)
        self._running.cancel()


@contextlib.asynccontextmanager
async def linked(judge=lambda info: None):
    service = Service()
    await service.start()

    async def discover():
        return [service.address]

    link = GrpcProposer(discover, judge)
    running = asyncio.create_task(link.run())
    try:
        yield service, link
    finally:
        running.cancel()
        await service.stop()


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def ref(version: int, name: str = "chat") -> Ref:
    return Ref(request_id=name, epoch=1, version=version, digest=bytes(16))


def feed(version: int, first_base: int, *tokens: int, reset: bool = False, depth: int = 2) -> FeedRows:
    return FeedRows(
        ref=ref(version),
        first_base=first_base,
        hidden=torch.ones(len(tokens), 4),
        next_ids=tokens,
        depth=depth,
        reset=reset,
    )


async def collect(link: GrpcProposer, *refs: Ref) -> dict[str, Draft]:
    return await asyncio.to_thread(link.collect, refs, 30.0)


async def test_rows_go_out_and_drafts_come_back():
    async with linked() as (_, link):
        await until(lambda: link.ready)
        link.feed([feed(1, 0, 10, 11, reset=True)])
        assert (await collect(link, ref(1)))["chat"].tokens == (12, 13)
        link.feed([feed(2, 2, 20)])
        assert (await collect(link, ref(2)))["chat"].tokens == (21, 22)


async def test_a_lost_proposer_raises_the_generation_and_what_it_held_must_be_opened_anew():
    async with linked() as (service, link):
        await until(lambda: link.ready)
        link.feed([feed(1, 0, 10, reset=True)])
        await collect(link, ref(1))
        generation = link.generation
        await service.stop()
        await until(lambda: not link.ready)
        link.feed([feed(2, 1, 20)])  # nobody is there: dropped, and not waited for
        assert await collect(link, ref(2)) == {}
        assert link.detail
        await service.start()
        await until(lambda: link.ready)
        assert link.generation > generation
        link.feed([feed(3, 2, 30)])  # not opened on this connection: would leave a gap
        assert await collect(link, ref(3)) == {}
        link.feed([feed(3, 0, 10, 20, 30, reset=True)])
        assert (await collect(link, ref(3)))["chat"].tokens == (31, 32)


async def test_a_refused_feed_opens_the_stream_anew():
    async with linked() as (service, link):
        await until(lambda: link.ready)
        link.feed([feed(1, 0, 10, reset=True)])
        await collect(link, ref(1))
        generation = link.generation
        link.feed([feed(2, 5, 20)])
        assert await collect(link, ref(2)) == {}
        await until(lambda: link.ready and link.generation > generation)
        await until(lambda: not service.engine.sequences)


async def test_a_proposer_of_another_model_is_not_used_and_the_detail_says_why():
    async with linked(judge=lambda info: f"its hidden size is {info.hidden_size}, not 8") as (_, link):
        await until(lambda: link.detail == "its hidden size is 4, not 8")
        assert not link.ready
        link.feed([feed(1, 0, 10, reset=True)])
        assert await collect(link, ref(1)) == {}


async def test_two_targets_may_hold_one_request_and_the_end_of_a_stream_forgets_only_its_own():
    async with linked() as (service, first):

        async def discover():
            return [service.address]

        second = GrpcProposer(discover, lambda info: None)
        running = asyncio.create_task(second.run())
        await until(lambda: first.ready and second.ready)
        first.feed([feed(1, 0, 10, reset=True)])
        second.feed([feed(1, 0, 50, 51, reset=True)])
        assert (await collect(first, ref(1)))["chat"].tokens == (11, 12)
        assert (await collect(second, ref(1)))["chat"].tokens == (52, 53)
        running.cancel()
        await until(lambda: len(service.engine.sequences) == 1)
        first.feed([feed(2, 1, 20)])
        assert (await collect(first, ref(2)))["chat"].tokens == (21, 22)


async def test_closing_a_request_forgets_its_sequence():
    async with linked() as (service, link):
        await until(lambda: link.ready)
        link.feed([feed(1, 0, 10, reset=True)])
        await until(lambda: service.engine.sequences)
        link.feed([], ["chat"])
        await until(lambda: not service.engine.sequences)


async def test_a_sender_that_overruns_its_queue_starts_anew(monkeypatch):
    monkeypatch.setattr(proposer_link, "MAX_QUEUED_FRAMES", 2)
    async with linked() as (_, link):
        await until(lambda: link.ready)
        generation = link.generation
        for version in range(1, 9):  # the loop has no turn in between: frames only queue
            link.feed([replace(feed(version, 0, 10, reset=True), ref=ref(version))])
        await until(lambda: link.ready and link.generation > generation)
