"""`seqmtp bench all`: every kind of bench, one after the other, each in a process of its own with a share of the time.

A part that fails, or takes longer than it may (`parts.py`), is reported as such and costs no other. The whole takes no
longer than its time, but for the seconds that the last part needs to stop what it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import psutil

from services.bench.aims import held_against_aims
from services.bench.machine import describe_machine
from services.bench.parts import Part
from services.bench.processes import alive, family

GOODBYE_S = 20.0  # for a part that is ended to stop the services it started
TAIL = 1500  # characters kept of what a failed part said

Outcome = Literal["measured", "failed", "out of time"]


async def run_part(
    argv: Sequence[str], limit_s: float, command: Sequence[str] = (sys.executable, "-m", "services.cli", "bench")
) -> dict[str, Any]:
    """`seqmtp bench ARGV` to its end, or until it has taken so long. Never raises for what it does."""
    began = perf_counter()
    process = await asyncio.create_subprocess_exec(
        *command,
        *argv,
        "--json",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C comes from us, once
    )
    assert process.stdout is not None
    assert process.stderr is not None
    printed = asyncio.create_task(process.stdout.read())
    said = asyncio.create_task(_pass_on(process.stderr))
    outcome: Outcome = "out of time"
    try:
        async with asyncio.timeout(limit_s):
            outcome = "measured" if await process.wait() == 0 else "failed"
    except TimeoutError:
        pass
    finally:
        await _end(process)
    report = None
    if outcome == "measured":
        try:
            report = json.loads(await printed)
        except ValueError:
            outcome = "failed"
    printed.cancel()
    return {
        "outcome": outcome,
        "seconds": round(perf_counter() - began, 1),
        "share_s": round(limit_s, 1),
        "command": f"seqmtp bench {' '.join(argv)}",
        "said": "" if outcome == "measured" else await said,
        "report": report,
    }


async def _pass_on(stream: asyncio.StreamReader) -> str:
    """Show what comes as it comes; returns the end of it."""
    tail = ""
    while data := await stream.read(4096):
        text = data.decode(errors="replace")
        sys.stderr.write(text)
        sys.stderr.flush()
        tail = (tail + text)[-TAIL:]
    return tail.strip()


async def _end(process: asyncio.subprocess.Process) -> None:
    """A part that still runs is interrupted, so that it stops what it started; then all of it is killed."""
    if process.returncode is None:
        members = family(psutil.Process(process.pid))
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await process.wait()
        for member in alive(members):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        await process.wait()


async def measure_all(
    model: str,
    parts: Sequence[Part],
    *,
    seconds: float,
    output: Path | None = None,
    run: Callable[[Sequence[str], float], Awaitable[dict[str, Any]]] = run_part,
    clock: Callable[[], float] = perf_counter,
) -> dict[str, Any]:
    """Run the parts in turn; `output` is written after each. Progress, theirs and ours, goes to standard error."""
    results: dict[str, dict[str, Any]] = {}
    started, end = datetime.now(UTC).isoformat(timespec="seconds"), clock() + seconds
    report = _report(model, started, results)
    for number, part in enumerate(parts, 1):
        limit_s = part.limit_s(end - clock(), parts[number:])
        words = part.words(limit_s)
        _say(f"[{number}/{len(parts)}] {part.name}, at most {limit_s:.0f} s: seqmtp bench {' '.join(words)}")
        results[part.name] = await run(words, limit_s)
        _say(f"[{number}/{len(parts)}] {part.name}: {results[part.name]['outcome']}, {results[part.name]['seconds']} s")
        report = _report(model, started, results)
        if output is not None:
            await asyncio.to_thread(output.write_text, json.dumps(report, indent=2) + "\n")
    return report


def _report(model: str, started: str, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "model": model,
        "machine": describe_machine(),
        "date": started,
        "seconds": round(sum(one["seconds"] for one in results.values()), 1),
        "complete": all(one["outcome"] == "measured" for one in results.values()),
        "aims": held_against_aims({name: one["report"] for name, one in results.items()}),
        "parts": dict(results),
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
