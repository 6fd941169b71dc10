"""One reading for everybody, and a coordinator that hangs holds nobody up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from seqmtp_serve.errors import NotReady
from services.gateway import board as board_module
from services.gateway.board import StatusBoard
from services.gateway.coordinators import CoordinatorStatus
from services.gateway.fake import STATUS, FakeCoordinator
from tests.services.gateway.world import TOKENIZER


class Asked(FakeCoordinator):
    """Counts readings; they end when `free` is set."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER, [])
        self.num_asked = 0
        self.free = asyncio.Event()
        self.free.set()

    async def status(self) -> Sequence[CoordinatorStatus]:
        self.num_asked += 1
        await self.free.wait()
        return self.statuses


async def test_many_callers_share_one_reading() -> None:
    asked = Asked()
    board = StatusBoard(asked)
    found = await asyncio.gather(*(board.statuses() for _ in range(20)))
    assert found == [[STATUS]] * 20
    assert asked.num_asked == 1


async def test_a_caller_that_leaves_does_not_take_the_reading_with_it() -> None:
    asked = Asked()
    asked.free.clear()
    board = StatusBoard(asked)
    leaving, staying = asyncio.create_task(board.statuses()), asyncio.create_task(board.statuses())
    await asyncio.sleep(0)
    leaving.cancel()
    asked.free.set()
    assert await staying == [STATUS]
    assert asked.num_asked == 1


async def test_generation_goes_on_with_the_last_reading_while_a_new_one_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "FRESH_S", 0.0)
    asked = Asked()
    board = StatusBoard(asked)
    assert await board.serving() == STATUS
    asked.free.clear()
    assert await board.serving() == STATUS
    assert await board.serving() == STATUS
    await asyncio.sleep(0)
    assert asked.num_asked == 2  # one reading hangs, and nobody started a third
    await board.close()


async def test_without_a_reading_the_first_caller_waits_and_too_old_a_one_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Asked()
    board = StatusBoard(asked)
    asked.statuses = []
    with pytest.raises(NotReady):
        await board.serving()
    asked.statuses = [replace(STATUS, coordinator_id="new")]
    assert (await board.serving()).coordinator_id == "new"
    monkeypatch.setattr(board_module, "STALE_S", 0.0)
    asked.statuses = []
    with pytest.raises(NotReady):
        await board.serving()
