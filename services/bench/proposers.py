"""`seqmtp bench proposers`: services side by side that differ in where the MTP module runs, and in their cohorts.

    remote       the module in a process of its own: rows and drafts travel
    colocated    the same module in the target's process
    …-2          with two cohorts: while one part of the batch verifies, the other drafts and commits
    …-auto       with depth control: a depth of the workload is the most it may take; the others always take it

All run at once, on the same cores, and take turns: each pass of the workload goes to every one of them before the next
begins, so slow drift of the machine meets all. A figure of one system is against its own depth 0, as everywhere;
`of_colocated` is its speed against the colocated module at the same depth and concurrency, `of_one_cohort` against the
same system without a second cohort, `of_plain` against the fastest system at depth 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from seqmtp_serve.errors import InvalidField
from services.bench import figures
from services.bench.backend import Backend
from services.bench.figures import Cell
from services.bench.in_time import in_time
from services.bench.machine import describe_machine
from services.bench.speculation import Workload, progress_of, run_pass, seconds_left
from services.bench.startup import running

SYSTEMS = ("remote", "remote-2", "remote-auto", "colocated", "colocated-2", "colocated-auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A service to start."""

    name: str
    mtp: str | None
    max_batch: int
    max_depth: int

    def serve_args(self) -> list[str]:
        """How. Texts are sent more than once, so no prefix is kept."""
        where, _, how = self.name.partition("-")
        if self.name not in SYSTEMS:
            raise InvalidField(f"{self.name!r} is no system; there are {', '.join(SYSTEMS)}", param="systems")
        return [
            "--no-ray",
            *("--proposer", where),
            *("--cohorts", how if how.isdigit() else "1"),
            *("--depth-policy", "auto" if how == "auto" else "static"),
            *("--max-num-seqs", str(self.max_batch)),
            *("--prefix-cache-pages", "0"),
            *("--speculative-config", f'{{"num_speculative_tokens": {self.max_depth}}}'),
            *(("--mtp", self.mtp) if self.mtp else ()),
        ]


async def measure_proposers(model: str, systems: Sequence[System], workload: Workload, began: float) -> dict[str, Any]:
    """Start all at once, measure in turns, stop all. Raises NotReady for a service that does not come up.

    `began`: when its time did; starting them is part of it.
    """
    arguments = {system.name: system.serve_args() for system in systems}
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.TaskGroup() as group:
                starts = {
                    name: group.create_task(stack.enter_async_context(running(model, serve_args)))
                    for name, serve_args in arguments.items()
                }
        except ExceptionGroup as faults:
            raise faults.exceptions[0] from None
        backends = {name: start.result()[0] for name, start in starts.items()}
        cells = await take_turns(backends, workload, began)
        first = next(iter(backends.values()))
        name, numerics = first.model, first.numerics
    return {
        "model": name,
        "numerics": numerics,
        "machine": describe_machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "workload": workload.to_json(),
        "turns": {"asked": len(workload.turns()), "measured": _num_turns(cells)},
        "proposers": compared(cells),
    }


async def take_turns(backends: Mapping[str, Backend], workload: Workload, began: float) -> dict[str, list[Cell]]:
    """Every pass of the workload on every system; the one that goes first changes. `began`: when its time did."""
    cells: dict[str, list[Cell]] = {name: [] for name in backends}
    names, turns = list(backends), workload.turns()
    with progress_of(turns, len(backends)) as progress:
        for backend in backends.values():
            for depth in workload.depths:
                await backend.generate(
                    workload.kinds[0].prompts[0], depth=depth, max_tokens=min(16, workload.max_tokens)
                )
        passes = (one for turn in in_time(turns, seconds_left(workload, began)) for one in turn.passes)
        for index, one in enumerate(passes):
            first = index % len(names)
            for name in names[first:] + names[:first]:
                progress.set_postfix(system=name, depth=one.depth, concurrency=one.concurrency)
                cells[name].append(await run_pass(backends[name], one, workload.max_tokens, progress))
    return cells


def _num_turns(cells: Mapping[str, Sequence[Cell]]) -> int:
    (own, *_) = cells.values()
    return len({(one.kind, one.concurrency, one.repeat, one.turn) for one in own})


def compared(cells: Mapping[str, Sequence[Cell]]) -> list[dict[str, Any]]:
    """The runs of every system, each beside the others."""
    runs = [{"system": name} | run for name, own in cells.items() for run in figures.runs(own)]
    tps = {(run["system"], run["kind"], run["concurrency"], run["depth"]): run["tps"] for run in runs}
    text_of = {name: {(one.kind, one.concurrency): one.texts for one in own} for name, own in cells.items()}
    reference = next(iter(text_of.values()))
    for run in runs:
        place = (run["kind"], run["concurrency"], run["depth"])
        where, _, cohorts = str(run["system"]).partition("-")
        plain = max(tps[name, run["kind"], run["concurrency"], 0] for name in cells)
        run["of_plain"] = round(run["tps"] / plain, 4)
        run["of_colocated"] = _ratio(run["tps"], tps.get(("colocated", *place))) if where != "colocated" else None
        run["of_one_cohort"] = _ratio(run["tps"], tps.get((where, *place))) if cohorts else None
        run["text_equal"] = run["text_equal"] and text_of[run["system"]] == reference
    return runs


def _ratio(tps: float, other: float | None) -> float | None:
    return None if other is None else round(tps / other, 4)
