"""The rig once: start a service, harm it, judge it, stop it.

Real processes of every role, two each, on a random model small enough that protocol, not arithmetic, takes the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from time import monotonic

from services.settings import (
    EngineSettings,
    ModelSettings,
    RegistrySettings,
    SchedulerSettings,
    Settings,
    StoreSettings,
)
from services.store.durability import Durability
from tests.chaos.checker import Violation
from tests.chaos.history import History, Received
from tests.chaos.rig.campaign import Campaign, FaultResult
from tests.chaos.rig.faults import Fault
from tests.chaos.rig.held import AT_ONCE
from tests.chaos.rig.points import Points
from tests.chaos.rig.requests import draw_wishes
from tests.chaos.rig.workers import Workers
from tests.services.tiny_model import single_letters, write_tiny_model

MAX_LEN = 512
DRAIN_S = 1.0  # short: some streams end in time, others must be handed over


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run of the rig."""

    results: tuple[FaultResult, ...]
    violations: tuple[Violation, ...]
    num_disconnects: int
    num_streams: int
    num_rows: int
    num_commits: int
    seconds: float
    held: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # before clients hung up, and when all was over


async def run(
    folder: Path,
    faults: Sequence[Fault],
    *,
    num_streams: int,
    num_disconnects: int,
    seed: int,
    max_tokens: tuple[int, int] = (50, 100),
    num_wishes: int = 16,
    control: str | None = None,
    budget_s: float = float("inf"),
    replay_window_s: float = 20.0,
    reader_grace_s: float = 6.0,
    durability: Durability = "C1",
    standby: bool = False,
    apart: bool = False,
) -> Outcome:
    """`num_streams` streams through each fault, then clients that hang up, then the verdict.

    No fault begins after `budget_s`; the outcome holds those that did. Grace and replay window must outlast a pause and
    a reconnect: a stream without a reader is cancelled, a text that ended meanwhile is read from its record.

    With a `standby` the store has a replica, as `durability` C3 needs, and `fail_overs()`. `apart`: each worker has a
    network namespace of its own, as `partitions()` need; see `namespaces.why_not`.

    With a `control` the service is broken on purpose: what it still holds at the end is not waited for.
    """
    started, rng = monotonic(), Random(seed)

    def say(what: str) -> None:
        print(f"{monotonic() - started:6.1f} s  {what}", flush=True)

    model = write_tiny_model(folder / "model", single_letters())
    settings = Settings(
        model=ModelSettings(path=str(model), mtp=str(model.parent / "tiny-mtp")),
        engine=EngineSettings(max_model_len=MAX_LEN, max_num_seqs=8, weights="fp32"),
        scheduler=SchedulerSettings(
            reader_grace_s=reader_grace_s, prefill_chunk=16, lease_s=5.0, step_deadline_ms=2_000.0
        ),
        store=StoreSettings(replay_window_s=replay_window_s, durability=durability),
        registry=RegistrySettings(ttl_s=1.5, period_s=0.5),
        drain_s=DRAIN_S,
    )
    wishes = await draw_wishes(model, num_wishes, max_tokens=max_tokens, rng=rng, max_len=MAX_LEN)
    async with Points(folder / "points") as points:
        workers = Workers(
            folder, settings, copies=2, points=points.folder, control=control, standby=standby, apart=apart
        )
        try:
            await workers.start()
            say("ready")
            campaign = Campaign(workers, points, wishes, rng)
            for number, fault in enumerate(faults, 1):
                if monotonic() - started > budget_s:
                    break
                result = await campaign.under(fault, num_streams)
                say(f"{number}/{len(faults)} {_in_words(result)}")
            await campaign.disconnects(num_disconnects, at_once=AT_ONCE)
            say(f"{num_disconnects} clients hung up")
            violations, history = await campaign.verdict(with_leaks=control is None)
            say(f"{len(violations)} violations")
        finally:
            await workers.stop()
    return _outcome(campaign.results, violations, history, num_disconnects, monotonic() - started, campaign.held)


def _in_words(result: FaultResult) -> str:
    fault = result.fault
    what = f"{fault.role} {fault.how} at {fault.at} {fault.point}"
    if result.missed:
        return f"{what}: nobody came by"
    silence = f"longest silence of a stream {max(result.silence_s, default=0.0):.2f} s"
    return f"{what}: {silence}" + "".join(f"; {reason}" for reason in sorted(set(result.breaks)))


def _outcome(
    results: Sequence[FaultResult],
    violations: tuple[Violation, ...],
    history: History,
    num_disconnects: int,
    seconds: float,
    held: Mapping[str, tuple[int, int]],
) -> Outcome:
    return Outcome(
        results=tuple(results),
        violations=violations,
        num_disconnects=num_disconnects,
        num_streams=len({event.stream for event in history.clients}),
        num_rows=sum(isinstance(event, Received) for event in history.clients),
        num_commits=len(history.store),
        seconds=seconds,
        held=held,
    )
