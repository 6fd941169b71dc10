"""`seqmtp bench speculation`: the same prompts at every depth and concurrency, interleaved in one run."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from time import perf_counter
from typing import Any

from tqdm import tqdm

from services.bench import figures
from services.bench.backend import Backend, Depth
from services.bench.figures import Cell
from services.bench.machine import describe_machine
from services.bench.prompts import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One cell of one repeat."""

    kind: Kind
    concurrency: int
    depth: Depth
    prompts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is measured. Every depth sees the same prompts in every repeat.

    `prompts_a_stream` bounds the prompts of a pass to this many for each concurrent stream, at least four: few streams
    are slow. None: all of them.
    """

    kinds: tuple[Kind, ...]
    depths: tuple[Depth, ...] = (0, 1, 2, 3)
    concurrencies: tuple[int, ...] = (1, 8)
    repeats: int = 3
    max_tokens: int = 128
    prompts_a_stream: int | None = None

    def passes(self) -> list[Pass]:
        """In the order of measurement; the depth that goes first changes with each repeat."""
        order = []
        for repeat in range(self.repeats):
            turn = repeat % len(self.depths)
            depths = self.depths[turn:] + self.depths[:turn]
            for kind, concurrency, depth in product(self.kinds, self.concurrencies, depths):
                prompts = kind.prompts[: self._num_prompts(kind, concurrency)]
                order.append(Pass(kind=kind, concurrency=concurrency, depth=depth, prompts=prompts))
        return order

    def _num_prompts(self, kind: Kind, concurrency: int) -> int:
        return len(kind.prompts) if self.prompts_a_stream is None else max(4, self.prompts_a_stream * concurrency)


async def measure(backend: Backend, workload: Workload) -> dict[str, Any]:
    """Warm up, run every pass, and return the report. Progress goes to standard error."""
    order = workload.passes()
    with tqdm(total=sum(len(one.prompts) for one in order), unit="reply", desc="bench") as progress:
        for depth in workload.depths:
            prompt = workload.kinds[0].prompts[0]
            await backend.generate(prompt, depth=depth, max_tokens=min(16, workload.max_tokens))
        cells = []
        for one in order:
            progress.set_postfix(kind=one.kind.name, depth=one.depth, concurrency=one.concurrency)
            cells.append(await run_pass(backend, one, workload.max_tokens, progress))
    return {
        "model": backend.model,
        "numerics": backend.numerics,
        "machine": describe_machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "workload": {
            "prompts": max(len(one.prompts) for one in order),
            "max_tokens": workload.max_tokens,
            "repeats": workload.repeats,
            "kinds": {kind.name: kind.sampling for kind in workload.kinds},
        },
        "runs": figures.runs(cells),
    }


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
    started = perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(one.concurrency, len(one.prompts))):
            group.create_task(worker())
    seconds = perf_counter() - started
    after = await backend.counters()
    return Cell(
        kind=one.kind.name,
        depth=one.depth,
        concurrency=one.concurrency,
        seconds=seconds,
        num_tokens=num_tokens,
        texts=tuple(texts),
        counters={name: value - before.get(name, 0.0) for name, value in after.items()},
    )
