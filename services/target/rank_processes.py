"""The ranks of a target group as child processes of its leader, on one machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from services.lifeline import die_with_parent
from services.target.rank_spec import RankSpec, on_device_of


class Ranks(Protocol):
    """Started ranks, however they were started. Leaving the block that started them ends them at once."""

    async def first_end(self) -> str:
        """Wait until any of them ends by itself; says which."""
        ...

    async def kill(self) -> None:
        """End them all at once, a stopped one too."""
        ...


class _Processes:
    def __init__(self, processes: Sequence[asyncio.subprocess.Process]) -> None:
        self._processes = processes

    async def first_end(self) -> str:
        waiting = {asyncio.create_task(process.wait()): rank for rank, process in enumerate(self._processes, start=1)}
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        return "; ".join(f"rank {waiting[task]} ended with code {task.result()}" for task in done)

    async def kill(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await asyncio.gather(*(process.wait() for process in self._processes))


@contextlib.asynccontextmanager
async def rank_processes(specs: Sequence[RankSpec]) -> AsyncIterator[Ranks]:
    """Start `python -m services.target.rank` for each. They log where this process does, and never outlive it."""
    processes: list[asyncio.subprocess.Process] = []
    running = _Processes(processes)
    try:
        for spec in specs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.target.rank",
                stdin=asyncio.subprocess.PIPE,
                env=dict(os.environ),
                preexec_fn=partial(die_with_parent, signal.SIGKILL),
            )
            processes.append(process)
            assert process.stdin is not None
            own = replace(spec, settings=on_device_of(spec.settings, spec.rank))
            process.stdin.write(own.to_json().encode())
            await process.stdin.drain()
            process.stdin.close()
        yield running
    finally:
        await running.kill()
