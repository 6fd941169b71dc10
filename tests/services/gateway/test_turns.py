"""A burst of requests: one is let in at each pass of the event loop, in order, and whatever else there is goes on."""

from __future__ import annotations

import asyncio
from typing import Any

from services.gateway.turns import Turns

POST = {"type": "http", "method": "POST"}


class Inside:
    """An application that notes in which pass of the loop each request came."""

    def __init__(self) -> None:
        self.now = 0
        self.came: list[tuple[int, int]] = []  # request, pass
        self._counting = asyncio.create_task(self._count())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.came.append((scope["number"], self.now))

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.now += 1

    def end(self) -> None:
        self._counting.cancel()


def ask(turns: Turns, number: int, **scope: Any) -> asyncio.Task[None]:
    none: Any = None
    return asyncio.create_task(turns({**POST, "number": number, **scope}, none, none))


async def test_a_burst_comes_in_one_by_one_and_in_order() -> None:
    inside = Inside()
    turns = Turns(inside)
    await asyncio.gather(*(ask(turns, number) for number in range(50)))
    assert [number for number, _ in inside.came] == list(range(50))
    passes = [when for _, when in inside.came]
    assert len(set(passes)) == 50, "each in a pass of its own"
    assert passes[-1] - passes[0] < 60, "and nobody waits without need"
    inside.end()


async def test_reading_and_one_request_alone_wait_for_nobody() -> None:
    inside = Inside()
    turns = Turns(inside)
    burst = [ask(turns, number) for number in range(20)]
    looks = [ask(turns, 100 + number, method="GET") for number in range(5)]
    await asyncio.gather(*looks)
    assert [number for number, _ in inside.came][:6] == [0, 100, 101, 102, 103, 104]
    await asyncio.gather(*burst)
    await asyncio.sleep(0)
    before = inside.now
    await ask(turns, 200)
    assert inside.came[-1][0] == 200
    assert inside.came[-1][1] - before <= 1
    inside.end()


async def test_who_leaves_the_queue_holds_nobody_up() -> None:
    inside = Inside()
    turns = Turns(inside)
    burst = [ask(turns, number) for number in range(10)]
    await asyncio.sleep(0)
    for number in (1, 2, 5, 9):
        burst[number].cancel()
    await asyncio.gather(*burst, return_exceptions=True)
    assert [number for number, _ in inside.came] == [0, 3, 4, 6, 7, 8]
    await ask(turns, 10)
    assert inside.came[-1][0] == 10
    inside.end()
