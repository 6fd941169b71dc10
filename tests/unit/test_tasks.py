"""Tasks end when they are told to, even those that lose the first word of it."""

from __future__ import annotations

import asyncio

import pytest

from seqmtp_serve import tasks
from seqmtp_serve.tasks import Background, end_tasks


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "AGAIN_S", 0.01)


async def once_deaf(heard: list[str]) -> None:
    """Swallows its first cancellation, as `asyncio.wait_for` of Python 3.11 may."""
    for word in ("lost", "heard"):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            heard.append(word)
            if word == "heard":
                raise


async def test_a_cancellation_that_was_lost_is_said_again() -> None:
    heard: list[str] = []
    task = asyncio.create_task(once_deaf(heard))
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await end_tasks(task)
    assert task.cancelled()
    assert heard == ["lost", "heard"]


async def test_a_wait_whose_result_meets_its_cancellation_ends_all_the_same() -> None:
    """The very race: on Python 3.11 the first `cancel` is answered by the result, and the loop goes on."""
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def loop() -> None:
        await asyncio.wait_for(answer, 100)
        await asyncio.Event().wait()

    task = asyncio.create_task(loop())
    await asyncio.sleep(0)
    answer.set_result(None)
    async with asyncio.timeout(30):
        await end_tasks(task)
    assert task.done()


async def test_what_ended_tasks_raise_is_theirs() -> None:
    async def fails() -> None:
        raise ValueError("theirs")

    task = asyncio.create_task(fails())
    await asyncio.sleep(0)
    await end_tasks(task)
    assert isinstance(task.exception(), ValueError)
    await end_tasks()


async def test_a_background_task_that_dies_is_told_of_and_the_others_end_together() -> None:
    died: list[BaseException] = []
    background = Background(died.append)
    heard: list[str] = []
    fault = ValueError("broken")

    async def fails() -> None:
        raise fault

    background.spawn(once_deaf(heard))
    background.spawn(fails())
    await asyncio.sleep(0.001)
    async with asyncio.timeout(30):
        await background.end()
    assert died == [fault]
    assert heard == ["lost", "heard"]
