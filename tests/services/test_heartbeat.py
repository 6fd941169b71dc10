"""Heartbeats in a stream of rows: after the first, then only while there is no news; the rows are untouched."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import grpc
import pytest

from services.rpc.heartbeat import BEAT_S, HEARTBEAT, SILENCE_S, Heartbeats
from services.rpc.wire import common


def a_row(version: int) -> common.CommittedRow:
    return common.CommittedRow(request_id="r", version=version, tokens=(version,), origins="n")


class Wire:
    """What was written, and that no two writes met. `hold`: a peer that does not read."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.changed = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()
        self.error: Exception | None = None
        self._busy = False

    async def write(self, row: common.CommittedRow) -> None:
        assert not self._busy, "one write at a time"
        self._busy = True
        await self.open.wait()
        await asyncio.sleep(0)
        self._busy = False
        if self.error is not None:
            raise self.error
        self.versions.append(row.version)
        self.changed.set()

    async def until(self, length: int) -> None:
        async with asyncio.timeout(30):
            while len(self.versions) < length:
                self.changed.clear()
                await self.changed.wait()


async def test_a_sign_of_life_comes_after_the_first_row_and_whenever_there_is_no_other() -> None:
    wire = Wire()
    async with aclosing(Heartbeats(wire.write, beat_s=0.01)) as heartbeats:
        await asyncio.sleep(0.05)
        assert wire.versions == [], "nothing before the first row"
        await heartbeats.tell(a_row(1))
        assert wire.versions == [1, 0]
        await wire.until(4)
        assert wire.versions == [1, 0, 0, 0]
        await heartbeats.tell(a_row(2))
        assert [version for version in wire.versions if version] == [1, 2]
    told = len(wire.versions)
    await asyncio.sleep(0.05)
    assert len(wire.versions) == told, "nothing after the end"


async def test_rows_that_keep_coming_have_no_heartbeats_between_them() -> None:
    wire = Wire()
    async with aclosing(Heartbeats(wire.write, beat_s=1e9)) as heartbeats:
        for version in (1, 2, 3):
            await heartbeats.tell(a_row(version))
    assert wire.versions == [1, 0, 2, 3]


async def test_a_peer_that_does_not_read_gets_no_heartbeats_on_top() -> None:
    wire = Wire()
    async with aclosing(Heartbeats(wire.write, beat_s=0.01)) as heartbeats:
        await heartbeats.tell(a_row(1))
        wire.open.clear()
        telling = asyncio.create_task(heartbeats.tell(a_row(2)))
        await asyncio.sleep(0.05)
        before = len(wire.versions)
        wire.open.set()
        await telling
        assert wire.versions[before] == 2
        await wire.until(before + 3)
        assert set(wire.versions[before + 1 :]) == {0}, "and when it reads again they come"


async def test_errors_of_rows_are_raised_and_those_of_heartbeats_left_to_the_rows() -> None:
    wire = Wire()
    async with aclosing(Heartbeats(wire.write, beat_s=0.01)) as heartbeats:
        await heartbeats.tell(a_row(1))
        wire.error = grpc.aio.UsageError("the stream is over")
        await asyncio.sleep(0.05)
        with pytest.raises(grpc.aio.UsageError):
            await heartbeats.tell(a_row(2))
        wire.error = None


def test_silence_is_several_beats() -> None:
    assert SILENCE_S >= 3 * BEAT_S
    assert HEARTBEAT.version == 0
