"""A child process is started again after a crash, unless that cannot help; and it always ends when told to."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from services.child import LAST_PAUSE_S, STARTS_BEFORE_READY, STEADY_S, Child, judge_exit
from services.entry import EXIT_NO_RETRY

SLEEP = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"


def a_child(tmp_path: Path, script: str) -> Child:
    return Child(name="worker", command=(sys.executable, "-c", script), log=tmp_path / "worker.log")


async def until_up(worker: Child, starts: int = 1) -> int:
    async with asyncio.timeout(20):
        while not (worker.log.exists() and worker.log.read_text().count("up") >= starts):
            await asyncio.sleep(0.02)
    assert worker.process is not None
    return worker.process.pid


def test_who_is_started_again() -> None:
    assert not judge_exit(EXIT_NO_RETRY, 60.0, 1, was_ready=True).restart
    assert not judge_exit(1, 0.1, STARTS_BEFORE_READY, was_ready=False).restart
    assert judge_exit(1, 0.1, STARTS_BEFORE_READY, was_ready=True).restart
    assert judge_exit(-9, STEADY_S, 1, was_ready=True).pause_s == 0.0
    pauses = [judge_exit(1, 0.1, crashes, was_ready=True).pause_s for crashes in range(1, 12)]
    assert pauses == sorted(pauses)
    assert pauses[0] < pauses[-1] == LAST_PAUSE_S


async def test_a_killed_child_comes_back_and_a_stopped_one_does_not(tmp_path: Path) -> None:
    worker, ready = a_child(tmp_path, SLEEP), asyncio.Event()
    keeping = asyncio.create_task(worker.keep_alive(ready))
    first = await until_up(worker)
    os.kill(first, signal.SIGKILL)
    second = await until_up(worker, starts=2)
    assert second != first
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await worker.stop()
    assert worker.process is not None
    assert worker.process.returncode == -signal.SIGTERM
    assert worker.starts == 2
    assert "again in" in worker.tail()


async def test_a_child_that_a_restart_cannot_help_stays_down(tmp_path: Path) -> None:
    worker = a_child(tmp_path, f"import sys; sys.exit({EXIT_NO_RETRY})")
    assert await worker.keep_alive(asyncio.Event()) == EXIT_NO_RETRY
    assert worker.starts == 1


async def test_a_stubborn_child_is_killed(tmp_path: Path) -> None:
    worker = a_child(tmp_path, STUBBORN)
    worker.patience_s = 0.2
    keeping = asyncio.create_task(worker.keep_alive(asyncio.Event()))
    await until_up(worker)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await worker.stop()
    assert worker.process is not None
    assert worker.process.returncode == -signal.SIGKILL
