"""What the live board shows: every coordinator's totals, and who is registered. Pure but for its two readers.

Totals only rise while a coordinator lives, and a restarted one has another id: whoever watches subtracts two readings,
each coordinator by itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from services.gateway.coordinators import CoordinatorStatus, Worker

_POSITION = re.compile(r"drafted\.pos(\d+)")
_COST = "cost_ms."


class Part(BaseModel):
    """One side's readiness, with a sentence about it."""

    ready: bool
    detail: str


class PositionTotals(BaseModel):
    """Drafts at one position of the chain, and how many of them were accepted."""

    drafted: int
    accepted: int


class Totals(BaseModel):
    """Since the coordinator's start. E[R] = 1 + accepted / rounds; `rounds` are those that had drafts."""

    tokens: int
    rounds: int
    plain_rounds: int  # ordinary decoding
    drafted: int
    accepted: int
    positions: list[PositionTotals]
    cost_ms: dict[str, float]  # main, mtp, verify, pack, sync, round: disjoint, of steps without prefill
    replays: int
    target_losses: int


class CoordinatorView(BaseModel):
    """One coordinator that answered."""

    id: str
    running: int
    waiting: int
    max_waiting: int
    target: Part
    mtp: Part
    store: Part
    totals: Totals


class WorkerView(BaseModel):
    """One worker with a live lease; its id is new at each start."""

    id: str
    kind: str  # target, proposer or coordinator


class LiveBoard(BaseModel):
    """One look. A worker that died is missing once its lease lapsed (three seconds, by default)."""

    model: str | None
    coordinators: list[CoordinatorView]
    workers: list[WorkerView]


def live_board(model: str | None, statuses: Sequence[CoordinatorStatus], workers: Sequence[Worker]) -> LiveBoard:
    """One look as the page and `seqmtp top` read it. Pure."""
    return LiveBoard(
        model=model,
        coordinators=[_view(status) for status in statuses],
        workers=[WorkerView(id=worker.id, kind=worker.kind) for worker in workers],
    )


def totals_of(counters: Mapping[str, float]) -> Totals:
    """The counters of `Ledger.counters()` under the names of the board. Pure."""

    def count(*names: str) -> int:
        return int(sum(counters.get(name, 0.0) for name in names))

    depths = [int(found[1]) for name, value in counters.items() if value and (found := _POSITION.fullmatch(name))]
    return Totals(
        tokens=count("outputs"),
        rounds=count("rounds.accepted", "rounds.rejected"),
        plain_rounds=count("rounds.plain"),
        drafted=count("drafted"),
        accepted=count("accepted"),
        positions=[
            PositionTotals(drafted=count(f"drafted.pos{position}"), accepted=count(f"accepted.pos{position}"))
            for position in range(max(depths, default=-1) + 1)
        ],
        cost_ms={name.removeprefix(_COST): value for name, value in counters.items() if name.startswith(_COST)},
        replays=count("replays"),
        target_losses=count("target_losses"),
    )


def _view(status: CoordinatorStatus) -> CoordinatorView:
    return CoordinatorView(
        id=status.coordinator_id,
        running=status.running,
        waiting=status.waiting,
        max_waiting=status.max_waiting,
        target=Part(ready=status.target_ready, detail=status.target_detail),
        mtp=Part(ready=status.mtp_ready, detail=status.mtp_detail),
        store=Part(ready=status.store_ready, detail=status.store_detail),
        totals=totals_of(status.counters),
    )
