"""One child process that is kept alive: its log file, its restarts, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from services.entry import EXIT_NO_RETRY
from services.lifeline import die_with_parent

FIRST_PAUSE_S = 0.2
LAST_PAUSE_S = 5.0
STEADY_S = 10.0  # alive for so long, a later crash starts counting anew
STARTS_BEFORE_READY = 5  # crashes in a row that a service may have before it was ever ready
TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to do about an exit: start again after `pause_s`, or not at all."""

    restart: bool
    pause_s: float = 0.0


def judge_exit(code: int, alive_s: float, crashes: int, was_ready: bool) -> Verdict:
    """Pure. `crashes` counts this one and those before it without a steady time between.

    A service that says a new start will not help is left down; one that crashes again and again before the whole was
    ever ready is given up; any other comes back, ever more slowly.
    """
    if code == EXIT_NO_RETRY or (not was_ready and crashes >= STARTS_BEFORE_READY):
        return Verdict(restart=False)
    if alive_s >= STEADY_S:
        return Verdict(restart=True)
    return Verdict(restart=True, pause_s=min(LAST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (crashes - 1)))


@dataclass(slots=True, kw_only=True, eq=False)
class Child:
    """A service as a process of its own session: a Ctrl-C at the terminal reaches the launcher only."""

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    patience_s: float = 10.0  # from asking it to end to killing it
    process: asyncio.subprocess.Process | None = None
    starts: int = 0

    async def keep_alive(self, was_ready: asyncio.Event) -> int:
        """Start it, and again after each crash. Returns the exit code once it is not to be started again."""
        crashes = 0
        while True:
            started_at = monotonic()
            code = await self._run_once()
            alive_s = monotonic() - started_at
            crashes = 1 if alive_s >= STEADY_S else crashes + 1
            verdict = judge_exit(code, alive_s, crashes, was_ready.is_set())
            if not verdict.restart:
                return code
            self._note(f"{self.name} ended with code {code} after {alive_s:.1f} s: again in {verdict.pause_s:.1f} s")
            await asyncio.sleep(verdict.pause_s)

    async def stop(self) -> None:
        """Ask it to end, then make it. Does nothing if it is not running."""
        process = self.process
        if process is None or process.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), self.patience_s)
        except TimeoutError:
            self._note(f"{self.name} did not stop within {self.patience_s:.0f} s: killed")
            await self.kill()

    async def kill(self) -> None:
        """End it at once. Does nothing if it is not running."""
        if self.process is not None and self.process.returncode is None:
            self._signal(signal.SIGKILL)
            await self.process.wait()

    def tail(self) -> str:
        """The end of its log."""
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
            return log.read().decode(errors="replace").strip()
        return ""

    async def _run_once(self) -> int:
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self.starts += 1
        return await self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        """To its whole group: what it started goes with it."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def _note(self, line: str) -> None:
        with self.log.open("a") as log:
            log.write(f"--- launcher: {line}\n")
