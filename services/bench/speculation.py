"""`seqmtp bench speculation`: the same prompts at every depth and concurrency, interleaved in one run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from time import perf_counter, process_time
from typing import Any

from tqdm import tqdm

from services.bench import figures
from services.bench.backend import Backend, Depth
from services.bench.figures import Cell
from services.bench.in_time import in_time
from services.bench.machine import describe_machine
from services.bench.prompts import Kind

STEP_PROMPTS = 3.0  # a turn takes as long as so many prompts and those it has: measured at 1, 4 and 16, on two machines


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One cell of one repeat, or a turn of it: some of its prompts."""

    kind: Kind
    concurrency: int
    depth: Depth
    prompts: tuple[str, ...]
    repeat: int = 0
    turn: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The same prompts at every depth, in the order of measurement; the depth that goes first changes."""

    passes: tuple[Pass, ...]

    @property
    def cell(self) -> tuple[str, int]:
        return self.passes[0].kind.name, self.passes[0].concurrency

    @property
    def repeat(self) -> int:
        return self.passes[0].repeat

    @property
    def weight(self) -> float:
        return STEP_PROMPTS + len(self.passes[0].prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is measured. Every depth sees the same prompts in every repeat.

    `prompts_a_stream` bounds the prompts of a pass to this many for each concurrent stream, at least four: few streams
    are slow. None: all of them.

    Where the controller is held against the fixed depths, they take short turns: a prompt for each stream at every
    depth, then the next ones. So the machine's moods meet all of them, and each turn is a comparison of its own. So
    they do where all has to end in so many `seconds` (`in_time.py`).
    """

    kinds: tuple[Kind, ...]
    depths: tuple[Depth, ...] = (0, 1, 2, 3)
    concurrencies: tuple[int, ...] = (1, 8)
    repeats: int = 3
    max_tokens: int = 128
    prompts_a_stream: int | None = None
    seconds: float | None = None

    def turns(self) -> list[Turn]:
        """In the order of measurement."""
        return [
            Turn(
                passes=tuple(
                    Pass(kind=kind, concurrency=concurrency, depth=depth, prompts=prompts, repeat=repeat, turn=turn)
                    for depth in _rotated(self.depths, repeat + turn)
                )
            )
            for repeat, kind, concurrency in product(range(self.repeats), self.kinds, self.concurrencies)
            for turn, prompts in enumerate(self._prompts(kind, concurrency))
        ]

    def to_json(self) -> dict[str, Any]:
        """For a report."""
        return {
            "prompts": max(len(kind.prompts) for kind in self.kinds),
            "max_tokens": self.max_tokens,
            "repeats": self.repeats,
            "kinds": {kind.name: kind.sampling for kind in self.kinds},
        }

    def _prompts(self, kind: Kind, concurrency: int) -> list[tuple[str, ...]]:
        prompts = kind.prompts[: self._num_prompts(kind, concurrency)]
        size = concurrency if "auto" in self.depths or self.seconds else len(prompts)
        return [prompts[start : start + size] for start in range(0, len(prompts), size)]

    def _num_prompts(self, kind: Kind, concurrency: int) -> int:
        return len(kind.prompts) if self.prompts_a_stream is None else max(4, self.prompts_a_stream * concurrency)


def _rotated(depths: tuple[Depth, ...], turn: int) -> tuple[Depth, ...]:
    first = turn % len(depths)
    return depths[first:] + depths[:first]


async def measure(backend: Backend, workload: Workload, began: float) -> dict[str, Any]:
    """Warm up, run every pass, and return the report. Progress goes to standard error. `began`: when its time did."""
    turns, num_done = workload.turns(), 0
    with progress_of(turns) as progress:
        for depth in workload.depths:
            prompt = workload.kinds[0].prompts[0]
            await backend.generate(prompt, depth=depth, max_tokens=min(16, workload.max_tokens))
        cells = []
        for turn in in_time(turns, seconds_left(workload, began)):
            num_done += 1
            for one in turn.passes:
                progress.set_postfix(kind=one.kind.name, depth=one.depth, concurrency=one.concurrency)
                cells.append(await run_pass(backend, one, workload.max_tokens, progress))
    return {
        "model": backend.model,
        "numerics": backend.numerics,
        "machine": describe_machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "workload": workload.to_json(),
        "turns": {"asked": len(turns), "measured": num_done},
        "runs": figures.runs(cells),
    }


def progress_of(turns: Sequence[Turn], systems: int = 1) -> tqdm[Any]:
    """A bar over the replies of all turns, to standard error."""
    num_replies = systems * sum(len(one.prompts) for turn in turns for one in turn.passes)
    return tqdm(total=num_replies, unit="reply", desc="bench")


def seconds_left(workload: Workload, began: float) -> float | None:
    """For the turns of a workload that began then, at `perf_counter`; None: as long as they take."""
    return None if workload.seconds is None else max(0.0, workload.seconds - (perf_counter() - began))


async def run_pass(backend: Backend, one: Pass, max_tokens: int, progress: tqdm[Any]) -> Cell:
    """All prompts of a pass, `concurrency` at a time."""
    texts = [""] * len(one.prompts)
    num_tokens = 0
    waiting = iter(enumerate(one.prompts))

    async def worker() -> None:
        nonlocal num_tokens
        for index, prompt in waiting:  # one shared iterator: each prompt is taken once
            reply = await backend.generate(
                prompt, depth=one.depth, max_tokens=max_tokens, temperature=one.kind.temperature
            )
            texts[index] = reply.text
            num_tokens += reply.num_tokens
            progress.update()

    before = await backend.counters()
    started, worked = perf_counter(), process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(one.concurrency, len(one.prompts))):
            group.create_task(worker())
    seconds, cpu_seconds = perf_counter() - started, process_time() - worked
    after = await backend.counters()
    return Cell(
        kind=one.kind.name,
        repeat=one.repeat,
        turn=one.turn,
        depth=one.depth,
        concurrency=one.concurrency,
        seconds=seconds,
        cpu_seconds=cpu_seconds if backend.is_local else None,
        num_tokens=num_tokens,
        texts=tuple(texts),
        counters={name: value - before.get(name, 0.0) for name, value in after.items()},
    )
