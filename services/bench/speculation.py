"""`seqmtp bench speculation`: the same prompts at every depth and concurrency, interleaved in one run."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

from tqdm import tqdm

from services.bench import figures
from services.bench.backend import Backend
from services.bench.figures import Cell
from services.bench.machine import describe_machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is measured. Every (depth, concurrency) sees all prompts in every repeat."""

    prompts: tuple[str, ...]
    depths: tuple[int, ...] = (0, 1, 2, 3)
    concurrencies: tuple[int, ...] = (1, 8)
    repeats: int = 3
    max_tokens: int = 128

    def passes(self) -> list[tuple[int, int]]:
        """(depth, concurrency) in the order of measurement; the depth that goes first changes with each repeat."""
        order = []
        for repeat in range(self.repeats):
            turn = repeat % len(self.depths)
            depths = self.depths[turn:] + self.depths[:turn]
            order += [(depth, concurrency) for concurrency in self.concurrencies for depth in depths]
        return order


async def measure(backend: Backend, workload: Workload) -> dict[str, Any]:
    """Warm up, run every pass, and return the report. Progress goes to standard error."""
    order = workload.passes()
    with tqdm(total=len(order) * len(workload.prompts), unit="reply", desc="bench") as progress:
        for depth in workload.depths:
            await backend.generate(workload.prompts[0], depth=depth, max_tokens=min(16, workload.max_tokens))
        cells = []
        for depth, concurrency in order:
            progress.set_postfix(depth=depth, concurrency=concurrency)
            cells.append(await _pass(backend, workload, depth, concurrency, progress))
    return {
        "model": backend.model,
        "numerics": backend.numerics,
        "machine": describe_machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "workload": {
            "prompts": len(workload.prompts),
            "max_tokens": workload.max_tokens,
            "repeats": workload.repeats,
            "sampling": "greedy",
        },
        "runs": figures.runs(cells),
    }


async def _pass(backend: Backend, workload: Workload, depth: int, concurrency: int, progress: tqdm[Any]) -> Cell:
    texts = [""] * len(workload.prompts)
    num_tokens = 0
    waiting = iter(enumerate(workload.prompts))

    async def worker() -> None:
        nonlocal num_tokens
        for index, prompt in waiting:  # one shared iterator: each prompt is taken once
            reply = await backend.generate(prompt, depth=depth, max_tokens=workload.max_tokens)
            texts[index] = reply.text
            num_tokens += reply.num_tokens
            progress.update()

    before = await backend.counters()
    started = perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(workload.prompts))):
            group.create_task(worker())
    seconds = perf_counter() - started
    after = await backend.counters()
    return Cell(
        depth=depth,
        concurrency=concurrency,
        seconds=seconds,
        num_tokens=num_tokens,
        texts=tuple(texts),
        counters={name: value - before.get(name, 0.0) for name, value in after.items()},
    )
