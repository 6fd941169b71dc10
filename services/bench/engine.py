"""`seqmtp bench engine`: what one step of the target costs, by rows and depth, and what the engine holds.

Every cell is a batch of B greedy sequences at depth K, stepped by `stepper.py` in this process: no network, no store.
With `--ep n` the experts and the sequences are spread over n ranks, one process each (`engine_ranks.py`), and a step is
as long as this process, rank 0, sees it. Prompts are random token ids, so acceptance is that of made-up text: tokens/s
at a depth says what the steps cost, not what a user would see (`bench speculation` measures that). Cells are visited in
turn in every repeat, so slow drift of the machine meets all of them.

    C_main(B)      the pass over B rows, depth 0          C_verify(B, K)  the pass over B rows and their drafts

`cpu_ms_per_step` is processor time of this process, drafting included: on a machine that is busy with other work it
says more than any clock on the wall.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from statistics import median
from time import perf_counter, process_time
from typing import Any, Literal

from tqdm import tqdm

from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.config import EngineConfig, Kernels
from seqmtp_serve.engine.direct import DirectProposer
from seqmtp_serve.engine.memory import memory_ledger
from seqmtp_serve.engine.target import TargetEngine
from seqmtp_serve.local import build_engines
from seqmtp_serve.model.deepseek import ExpertShare
from seqmtp_serve.ports import StepReport
from services.bench.machine import describe_machine
from services.bench.stepper import Stepper
from services.bench.workspace import device_peak_growth, peak_growth, resident

NO_CHOICE = Kernels()
CHUNK = 256  # prompt rows of a prefill step


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWorkload:
    """What is timed. Every (batch, depth) sees `steps` steps in every repeat, after `context` prompt tokens each."""

    batches: tuple[int, ...] = (1, 2, 4, 8, 32)
    depths: tuple[int, ...] = (0, 1)
    context: int = 64
    steps: int = 16
    repeats: int = 3

    def engine(
        self,
        *,
        numerics: Literal["invariant", "fast"],
        weights: Literal["int8", "fp32", "bf16"],
        num_threads: int,
        page_size: int = 64,
        kernels: Kernels = NO_CHOICE,
        device: str = "cpu",
    ) -> EngineConfig:
        """A configuration that holds the largest cell."""
        longest = self.context + 1 + (self.steps + 1) * (max(self.depths) + 1)
        pages = -(-longest // page_size) + 1
        return EngineConfig(
            numerics=numerics,
            weights=weights,
            device=device,
            page_size=page_size,
            num_pages=max(self.batches) * pages,
            max_model_len=longest,
            max_batch=max(self.batches),
            max_depth=max(1, *self.depths),
            num_threads=num_threads,
            kernels=kernels,
        )


@dataclass(slots=True, kw_only=True)
class Cell:
    """Steps of one (batch, depth): whole milliseconds of each as seen from outside, and what the engine reported.

    `elsewhere` adds what other ranks did in the same steps: (tokens, rounds, rows).
    """

    batch: int
    depth: int
    step_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)
    elsewhere: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Tokens chosen, rounds, and rows of this process."""
        rows = [row for report in self.reports for row in report.rows]
        num_rows = sum(report.costs.num_rows for report in self.reports)
        return sum(len(row.tokens) for row in rows), len(rows), num_rows

    def figures(self, main: Cell) -> dict[str, Any]:
        """Medians over steps, and the best step, which other work on the machine disturbed least.

        `main` is the cell of this batch at depth 0.
        """
        num_tokens, num_rounds, num_rows = (sum(each) for each in zip(self.counts, *self.elsewhere, strict=True))
        forward = median(report.costs.forward for report in self.reports)
        plain = median(report.costs.forward for report in main.reports)
        best, plain_best = (min(report.costs.forward for report in cell.reports) for cell in (self, main))
        return {
            "batch": self.batch,
            "depth": self.depth,
            "rows": round(num_rows / len(self.reports), 2),
            "ms_per_step": round(median(self.step_ms), 4),
            "cpu_ms_per_step": round(median(self.cpu_ms), 4),
            "forward_ms": round(forward, 4),
            "mtp_ms": round(median(report.costs.draft_wait for report in self.reports), 4),
            "select_ms": round(median(report.costs.select for report in self.reports), 4),
            "pack_ms": round(median(report.costs.pack for report in self.reports), 4),
            "c_verify_over_c_main": round(forward / plain, 4) if self.depth else None,
            "forward_ms_best": round(best, 4),
            "c_verify_over_c_main_best": round(best / plain_best, 4) if self.depth else None,
            "tokens_per_round": round(num_tokens / num_rounds, 4),
            "tokens_per_s": round(num_tokens / (sum(self.step_ms) / 1e3), 2),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """One rank's engines over the workload. `rank` takes every `num_ranks`-th sequence of a batch."""

    workload: EngineWorkload
    engine: TargetEngine
    proposer: DirectProposer | None
    vocab_size: int
    rank: int = 0
    num_ranks: int = 1
    resident_before: int | None = None  # before anything was loaded

    @classmethod
    def open(
        cls,
        checkpoint: Checkpoint,
        workload: EngineWorkload,
        config: EngineConfig,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        share: ExpertShare | None = None,
    ) -> EngineRun:
        """Raises MtpIncomplete when a depth above 0 is asked for and there is no sound module."""
        if any(workload.depths):
            checkpoint.mtp_tensors()  # raises what building would pass over
        before = resident()
        engine, proposer = build_engines(checkpoint, config, share)
        return cls(
            workload=workload,
            engine=engine,
            proposer=proposer,
            vocab_size=checkpoint.config.vocab_size,
            rank=rank,
            num_ranks=num_ranks,
            resident_before=before,
        )

    def cells(self) -> dict[tuple[int, int], Cell]:
        """Time every (batch, depth)."""
        workload = self.workload
        cells = {
            (batch, depth): Cell(batch=batch, depth=depth) for batch in workload.batches for depth in workload.depths
        }
        silent = self.rank > 0
        with tqdm(total=len(cells) * workload.repeats, unit="cell", desc="bench", disable=silent) as progress:
            for repeat in range(workload.repeats + 1):  # the first is for warming up, and is not kept
                for (batch, depth), cell in cells.items():
                    timed = self._steps(batch, depth, 2 if repeat == 0 else workload.steps)
                    if repeat:
                        cell.step_ms += [wall for wall, _, _ in timed]
                        cell.cpu_ms += [cpu for _, cpu, _ in timed]
                        cell.reports += [report for _, _, report in timed]
                        progress.update()
        return cells

    def memory(self) -> dict[str, Any]:
        """The ledger with the largest batch running, and how far one of its steps raised resident memory at most (a
        GPU's: what was allocated there).

        `resident_growth` is what the kernel says that loading and running added: what it has beyond `total` is code,
        allocators' remains and whatever else nobody counts.
        """
        batch, depth = max(self.workload.batches), max(self.workload.depths)
        stepper = self._running(batch, depth)
        device = self.engine.device
        workspace = peak_growth(stepper.step) if device.type == "cpu" else device_peak_growth(stepper.step, device)
        proposer = self.proposer.engine if self.proposer else None
        ledger = memory_ledger(self.engine, proposer, branch_rows=len(stepper.refs) * (depth + 1))
        num_sequences, now = len(stepper.refs), resident()
        stepper.release()
        grown = None if now is None or self.resident_before is None else now - self.resident_before
        measured = {"workspace_peak": workspace, "resident_growth": grown}
        return asdict(ledger) | {"total": ledger.total, **measured, "batch": num_sequences}

    def _steps(self, batch: int, depth: int, num_steps: int) -> list[tuple[float, float, StepReport]]:
        """Milliseconds on the wall, milliseconds of processor time, and the report, for each step."""
        stepper = self._running(batch, depth)
        timed = []
        for _ in range(num_steps):
            started, busy = perf_counter(), process_time()
            report = stepper.step()
            timed.append(((perf_counter() - started) * 1e3, (process_time() - busy) * 1e3, report))
        stepper.release()
        return timed

    def _running(self, batch: int, depth: int) -> Stepper:
        stepper = Stepper(engine=self.engine, depth=depth)
        stepper.admit(self._prompts(batch), length=self.workload.context, chunk=CHUNK)
        stepper.step()  # takes the drafts that were made during prefill
        return stepper

    def _prompts(self, batch: int) -> Sequence[Sequence[int] | None]:
        """This rank's prompts; None for each that only a rank before it has."""
        draw = random.Random(0)
        every = [draw.choices(range(self.vocab_size), k=self.workload.context) for _ in range(batch)]
        own = every[self.rank :: self.num_ranks]
        return [*own, *[None] * (-(-batch // self.num_ranks) - len(own))]


def measure_engine(
    model: str, mtp: str | None, workload: EngineWorkload, config: EngineConfig, *, num_ranks: int = 1
) -> dict[str, Any]:
    """Load the checkpoint, time every cell, read the ledger of each rank.

    Raises ModelNotFound, TargetIncomplete, MtpIncomplete when a depth above 0 is asked for without a sound module, and
    InvalidField for several ranks of a model without experts.
    """
    checkpoint = open_checkpoint(model, mtp)
    if num_ranks == 1:
        run = EngineRun.open(checkpoint, workload, config)
        cells, memory, kernels = run.cells(), [run.memory()], run.engine.info().kernels
    else:
        from services.bench.engine_ranks import run_ranks

        cells, memory, kernels = run_ranks(checkpoint, mtp, workload, config, num_ranks)
    return {
        "model": checkpoint.name,
        "family": checkpoint.manifest.target.family,
        "fingerprint": checkpoint.manifest.fingerprint,
        "numerics": config.numerics,
        "weights": config.weights,
        "device": config.device,
        "storage": list(checkpoint.manifest.target.storage_dtypes),
        "ep_size": num_ranks,
        "kernels": kernels,
        "num_threads": config.num_threads,
        "machine": describe_machine(device=config.device),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "workload": asdict(workload) | {"sampling": "greedy", "prompts": "random ids"},
        "cells": [cell.figures(cells[cell.batch, 0]) for cell in cells.values()],
        "memory_bytes": memory,
    }
