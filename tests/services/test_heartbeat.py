"""Heartbeats in a stream of rows: after the first, then only while there is no news; the rows are untouched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from seqmtp_serve.request import CommittedRow
from services.rpc.heartbeat import BEAT_S, SILENCE_S, with_heartbeats


def a_row(version: int) -> CommittedRow:
    return CommittedRow(request_id="r", version=version, tokens=(version,), origins="n")


class Rows:
    """Rows that come when they are told to."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[CommittedRow | Exception | None] = asyncio.Queue()
        self.closed = False

    async def read(self) -> AsyncGenerator[CommittedRow, None]:
        try:
            while (row := await self.queue.get()) is not None:
                if isinstance(row, Exception):
                    raise row
                yield row
        finally:
            self.closed = True


async def test_a_sign_of_life_comes_after_the_first_row_and_whenever_there_is_no_other() -> None:
    rows = Rows()
    told = with_heartbeats(rows.read(), beat_s=0.01)
    first = asyncio.ensure_future(anext(told))
    assert await asyncio.wait({first}, timeout=0.05) == (set(), {first})  # nothing before it
    rows.queue.put_nowait(a_row(1))
    assert await first == a_row(1)
    assert [await anext(told) for _ in range(3)] == [None, None, None]
    rows.queue.put_nowait(a_row(2))
    rows.queue.put_nowait(None)
    assert [row async for row in told if row is not None] == [a_row(2)]
    assert rows.closed


async def test_rows_that_are_there_are_not_held_up() -> None:
    rows = Rows()
    for version in (1, 2, 3):
        rows.queue.put_nowait(a_row(version))
    rows.queue.put_nowait(None)
    assert [row async for row in with_heartbeats(rows.read(), beat_s=1e9)] == [a_row(1), None, a_row(2), a_row(3)]


async def test_errors_and_ends_pass_through() -> None:
    rows = Rows()
    rows.queue.put_nowait(ValueError("ours"))
    with pytest.raises(ValueError, match="ours"):
        [row async for row in with_heartbeats(rows.read())]
    left = Rows()
    left.queue.put_nowait(a_row(1))
    async with aclosing(with_heartbeats(left.read(), beat_s=0.01)) as told:
        assert [await anext(told) for _ in range(3)] == [a_row(1), None, None]
    assert left.closed


def test_silence_is_several_beats() -> None:
    assert SILENCE_S >= 3 * BEAT_S
