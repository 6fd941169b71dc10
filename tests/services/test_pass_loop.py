"""When the proposer's passes begin, what they share, and how an engine that breaks ends them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import pytest
import torch

from seqmtp_serve.ports import Draft, FeedRows
from seqmtp_serve.request import Ref
from seqmtp_serve.tasks import end_tasks
from services.proposer.worker import MAX_WAITING, PassLoop


class HeldEngine:
    """Answers each feed with one token; a pass ends when it is let go. Keeps which sequences each pass had."""

    num_sequences, num_held_pages = 1, 1

    def __init__(self) -> None:
        self.passes: list[list[str]] = []
        self.go = threading.Semaphore(0)
        self.breaks = False

    def propose(self, feeds: Sequence[FeedRows], closed: Sequence[str] = ()) -> Sequence[Draft]:
        self.passes.append([rows.ref.request_id.rpartition("\x1f")[2] for rows in feeds])
        assert self.go.acquire(timeout=30)
        if self.breaks:
            raise MemoryError("the pages are gone")
        return [Draft(ref=rows.ref, tokens=(7,)) for rows in feeds]

    def levels(self) -> Mapping[str, float]:
        return {}

    def check(self) -> None: ...


def feed(name: str) -> FeedRows:
    ref = Ref(request_id=name, epoch=1, version=1, digest=b"d" * 16)
    return FeedRows(ref=ref, first_base=0, hidden=torch.zeros(1, 2), next_ids=(7,), depth=1)


@asynccontextmanager
async def passing() -> AsyncIterator[tuple[PassLoop, HeldEngine, asyncio.Task[None]]]:
    engine = HeldEngine()
    loop = PassLoop(engine)
    running = asyncio.create_task(loop.run())
    try:
        async with asyncio.timeout(30):
            yield loop, engine, running
    finally:
        engine.go.release(1000)
        await end_tasks(running)


async def test_a_frame_is_one_pass_and_what_comes_meanwhile_shares_the_next() -> None:
    async with passing() as (loop, engine, _):
        one, other = loop.open_stream(), loop.open_stream()
        await loop.submit(one, [feed("a"), feed("b")])
        await loop.submit(one, [feed("c")])
        await loop.submit(other, [feed("d")])
        engine.go.release(2)
        assert [len(await one.answers.get()) for _ in range(2)] == [2, 1]
        assert [draft.ref.request_id for draft in await other.answers.get()] == ["d"]
    assert engine.passes == [["a", "b"], ["c", "d"]]


async def test_a_frame_longer_than_a_stream_may_wait_is_taken_all_the_same() -> None:
    names = [f"s{number}" for number in range(MAX_WAITING + 10)]
    async with passing() as (loop, engine, _):
        stream = loop.open_stream()
        engine.go.release(1000)
        await loop.submit(stream, [feed(name) for name in names])
        answered = 0
        while answered < len(names):
            answered += len(await stream.answers.get())
    assert [name for names_ in engine.passes for name in names_] == names


async def test_an_engine_that_breaks_ends_the_loop_and_no_pass_follows() -> None:
    async with passing() as (loop, engine, running):
        stream = loop.open_stream()
        engine.breaks = True
        await loop.submit(stream, [feed("a")])
        engine.go.release()
        with pytest.raises(MemoryError, match="pages are gone"):
            await running
        await loop.submit(stream, [feed("b")])
        loop.close_stream(stream)
    assert engine.passes == [["a"]]
