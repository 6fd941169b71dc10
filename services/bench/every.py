"""`seqmtp bench all`: every kind of bench, one after the other, each in a process of its own with a share of the time.

A part that fails, or takes longer than its share, is reported as such and costs no other part; those that take longest
know their share and measure each cell less often on a slow machine. Shares add up to the
whole time, so the whole takes no longer, but for the seconds that a part needs to stop what it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import psutil

from seqmtp_serve.checkpoint.locate import CODE_MODEL
from seqmtp_serve.errors import InvalidField
from services.bench.aims import held_against_aims
from services.bench.machine import describe_machine
from services.bench.processes import alive, family

GOODBYE_S = 20.0  # for a part that is ended to stop the services it started
TAIL = 1500  # characters kept of what a failed part said
TOLD = 0.8  # of its share, for a part that ends by itself: the turn under way then, and start and end, are beside it

Outcome = Literal["measured", "failed", "out of time"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One kind of bench as `seqmtp bench ARGV`, and how much of the time it may take."""

    name: str
    argv: tuple[str, ...]
    share_s: float


# name, share of the time, arguments, arguments for a quick look
_PARTS: tuple[tuple[str, float, str, str], ...] = (
    (
        "proposers",
        0.28,
        "proposers MODEL --num-prompts 8 --prompts-a-stream 1 --max-tokens 64 --repeats 2 --depths 0,1,2 "
        "--concurrency 1,4 --seconds SECONDS",
        "proposers MODEL --num-prompts 1 --max-tokens 8 --repeats 1 --depths 0,1 --concurrency 1",
    ),
    (
        "speculation",
        0.40,
        "speculation MODEL --depths 0,1,2,3,auto --kinds chat,predictable,random --concurrency 1,4,16 "
        "--prompts-a-stream 2 --max-tokens 48 --repeats 2 --seconds SECONDS",
        "speculation MODEL --depths 0,1,auto --kinds chat,random --concurrency 1,4 --num-prompts 4 --max-tokens 4 "
        "--repeats 1",
    ),
    (
        "engine",
        0.06,
        "engine MODEL --rows 1,8 --depths 0,1,3 --repeats 3 --steps 12",
        "engine MODEL --rows 1 --depths 0,1,3 --repeats 1 --steps 2",
    ),
    (
        "engine-v3-tiny",
        0.04,
        f"engine {CODE_MODEL} --rows 1,8 --depths 0,1,3 --repeats 3 --steps 24",
        f"engine {CODE_MODEL} --rows 1 --depths 0,1 --repeats 1 --steps 2",
    ),
    (
        "prefix",
        0.07,
        "prefix MODEL --words 100,400,1000 --repeats 3",
        "prefix MODEL --words 100 --repeats 1 --max-tokens 8",
    ),
    (
        "hidden",
        0.07,
        "hidden MODEL --num-prompts 12",
        "hidden MODEL --windows 0,32 --dtypes fp32,int8 --num-prompts 2 --prompt-chars 600 --max-tokens 8",
    ),
    (
        "scale",
        0.08,
        "scale MODEL --streams 64,256,1000",
        "scale MODEL --streams 8 --batch 8 --max-tokens 8 --step-ms 5",
    ),
)


def parts_of(model: str, *, quick: bool, minutes: float, only: Sequence[str] | None) -> list[Part]:
    """The parts to run. Raises InvalidField for a name that is none."""
    names = [name for name, *_ in _PARTS]
    if unknown := [name for name in only or () if name not in names]:
        raise InvalidField(f"{unknown[0]!r} is no part; there are {', '.join(names)}", param="only")
    chosen = [part for part in _PARTS if only is None or part[0] in only]
    parts = []
    for name, share, long, short in chosen:
        share_s = share * minutes * 60
        words = {"MODEL": model, "SECONDS": str(max(1, round(TOLD * share_s)))}
        argv = tuple(words.get(word, word) for word in (short if quick else long).split())
        parts.append(Part(name=name, argv=argv, share_s=share_s))
    return parts


async def measure_all(model: str, parts: Sequence[Part], *, output: Path | None = None) -> dict[str, Any]:
    """Run the parts in turn; `output` is written after each. Progress, theirs and ours, goes to standard error."""
    results: dict[str, dict[str, Any]] = {}
    started = datetime.now(UTC).isoformat(timespec="seconds")
    report = _report(model, started, results)
    for number, part in enumerate(parts, 1):
        _say(f"[{number}/{len(parts)}] {part.name}, at most {part.share_s:.0f} s: seqmtp bench {' '.join(part.argv)}")
        results[part.name] = await run_part(part)
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


async def run_part(
    part: Part, command: Sequence[str] = (sys.executable, "-m", "services.cli", "bench")
) -> dict[str, Any]:
    """One part to its end, or to the end of its share. Never raises for what it does."""
    began = perf_counter()
    process = await asyncio.create_subprocess_exec(
        *command,
        *part.argv,
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
        async with asyncio.timeout(part.share_s):
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
        "share_s": round(part.share_s, 1),
        "command": f"seqmtp bench {' '.join(part.argv)}",
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


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
