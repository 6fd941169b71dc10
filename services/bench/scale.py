"""`seqmtp bench scale`: how much the control plane carries, and what it costs, with a simulated target group.

Gateway, coordinator, store and target are the real processes on this machine; only the model is simulated
(`seqmtp_serve/simulated.py`), and the client shares the cores. So the processor time of a process for each committed
token is the figure that carries over; wall times say what this machine, with all that runs on it, made of it.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from statistics import quantiles
from time import perf_counter
from typing import Any

import psutil

from seqmtp_serve.frontier.ledger import hidden_share
from seqmtp_serve.simulated import SimulatedCosts
from services.bench.machine import describe_machine
from services.bench.many_streams import Seen, run_streams
from services.bench.processes import family, memory_of, pss_mib, role_of
from services.bench.startup import running
from services.bench.url_backend import UrlBackend
from services.target.simulated import VOCAB_SIZE

ROLES = ("coordinator", "gateway", "store", "target")
SETTLE_S = 1.0  # after the streams were opened, before memory is read


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleWorkload:
    """`streams` at once, `batch` of them running and the rest waiting."""

    streams: tuple[int, ...]
    batch: int = 64
    max_tokens: int = 64
    depth: int = 3
    cohorts: int = 1
    costs: SimulatedCosts = field(default_factory=SimulatedCosts)

    def serve_args(self) -> list[str]:
        """How the service is started."""
        return [
            "--no-ray",
            *("--simulated", json.dumps(asdict(self.costs))),
            *("--max-num-seqs", str(self.batch)),
            *("--max-waiting", str(max(self.streams))),
            *("--max-num-batched-tokens", str(self.batch * (self.depth + 1) + 512)),
            *("--cohorts", str(self.cohorts)),
            *("--speculative-config", json.dumps({"num_speculative_tokens": self.depth})),
        ]


async def measure_scale(model: str, workload: ScaleWorkload) -> dict[str, Any]:
    """Start the service, run each number of streams, stop it. `model` gives the tokenizer alone."""
    async with running(model, workload.serve_args()) as (backend, url, launcher):
        processes = {role: one for one in family(launcher) if (role := role_of(one)) in ROLES}
        seen = Seen()
        await run_streams(url, workload.batch, 16, VOCAB_SIZE, seen)  # warm
        runs = [await _run(backend, url, processes, workload, count) for count in workload.streams]
        memory = memory_of(processes.values())
    return {
        "model": backend.model,
        "machine": describe_machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "workload": asdict(workload),
        "scale": runs,
        "processes": memory,
    }


async def _run(
    backend: UrlBackend, url: str, processes: Mapping[str, psutil.Process], workload: ScaleWorkload, count: int
) -> dict[str, Any]:
    seen = Seen()
    before, cpu_before = await backend.counters(), _cpu_s(processes)
    pss_before = {role: pss_mib(one) for role, one in processes.items()}
    started = perf_counter()
    streams = asyncio.create_task(run_streams(url, count, workload.max_tokens, VOCAB_SIZE, seen))
    await asyncio.wait({streams}, timeout=SETTLE_S)
    pss = {role: pss_mib(one) for role, one in processes.items()}
    await streams
    seconds = perf_counter() - started
    cpu_s = _cpu_s(processes)
    after = await backend.counters()
    found = defaultdict(float, {name: value - before.get(name, 0.0) for name, value in after.items()})
    steps = sum(value for name, value in found.items() if name.startswith("steps.depth"))
    declared_ms = (found["cost_ms.main"] + found["cost_ms.verify"] + found["cost_ms.mtp"]) / max(1.0, steps)
    return {
        "streams": count,
        "seconds": round(seconds, 2),
        "tokens": seen.num_tokens,
        "tokens_per_s": round(seen.num_tokens / seconds, 1),
        "chunks": seen.num_chunks,
        "rounds_only_steps": steps,
        "declared_ms_a_step": round(declared_ms, 2),
        "added_ms_a_step": round((found["cost_ms.sync"] + found["cost_ms.pack"]) / max(1.0, steps), 2),
        "hidden_share": None if (share := hidden_share(found)) is None else round(share, 4),
        "cpu_us_a_token": {
            role: round(1e6 * (cpu_s[role] - cpu_before[role]) / max(1, seen.num_tokens), 1) for role in processes
        },
        "cores_used": {role: round((cpu_s[role] - cpu_before[role]) / seconds, 2) for role in processes},
        "emit_delay_ms": _spread(seen.emit_ms),
        "first_chunk_ms": _spread(seen.first_chunk_ms),
        "kib_a_stream": {role: round(1024 * (pss[role] - pss_before[role]) / count, 1) for role in processes},
        "wrong": seen.wrong[:10],
        "num_wrong": len(seen.wrong),
        "num_refused": seen.num_refused,
    }


def _cpu_s(processes: Mapping[str, psutil.Process]) -> dict[str, float]:
    """User and system time so far."""
    times = {role: one.cpu_times() for role, one in processes.items()}
    return {role: one.user + one.system for role, one in times.items()}


def _spread(values: list[float]) -> dict[str, float] | None:
    if len(values) < 2:
        return None
    cuts = quantiles(values, n=100, method="inclusive")
    return {"p50": round(cuts[49], 2), "p99": round(cuts[98], 2)}
