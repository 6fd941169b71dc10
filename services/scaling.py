"""How many target groups, coordinators and proposers there should be: policies for Ray Serve's autoscaler.

No request passes through the handles of these deployments, so Serve's own signal says nothing about them. What does, is
in the accounts: rows (tokens of prompts) that wait for a target, how long hidden rows wait for a proposer, and how many
drafts are accepted. Each replica reports it (`Worker.record_autoscaling_stats`); Serve calls a policy with what the
replicas said, and applies the bounds, delays and factors of `autoscaling_config` itself. One step at a time: its effect
is awaited.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.accounts import Account, AccountBook

SPARE_PROPOSERS = 1  # more than one a group and one to take over have nobody to draft for


class Context(Protocol):
    """What is read of `ray.serve.config.AutoscalingContext`."""

    target_num_replicas: int
    aggregated_metrics: Mapping[str, Mapping[Any, float]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLevels:
    """Of the whole service, now. `acceptance`: of the drafts verified since the last look; None: there were none."""

    queued_rows: float
    busy: float  # share of places for requests that are taken, 0 to 1
    groups: int
    queue_age_s: float
    acceptance: float | None

    def metrics(self) -> dict[str, float]:
        """For Serve: numbers by name."""
        found = {
            "queued_rows": self.queued_rows,
            "busy": self.busy,
            "groups": float(self.groups),
            "queue_age_s": self.queue_age_s,
        }
        return found if self.acceptance is None else {**found, "acceptance": self.acceptance}


class LevelsReader:
    """Reads the accounts; remembers the sums of drafts, to tell the recent ones."""

    def __init__(self, book: AccountBook) -> None:
        self._book = book
        self._drafts: tuple[float, float] | None = None

    async def read(self) -> dict[str, float]:
        """Empty while no coordinator's account is live: then nothing is known, and nothing is changed."""
        accounts = await self._book.refresh()
        if not any(each.kind == "coordinator" and each.is_live() for each in accounts):
            return {}
        drafts = _sum(accounts, "accepted"), _sum(accounts, "drafted")
        before, self._drafts = self._drafts or drafts, drafts
        return levels(accounts, since=before).metrics()


def levels(
    accounts: Sequence[Account], *, since: tuple[float, float] = (0.0, 0.0), now: float | None = None
) -> ScalingLevels:
    """From what every process wrote; `since`: accepted and drafted before. Pure, given `now`."""
    live = [each for each in accounts if each.is_live(now)]
    coordinators = [each.gauges for each in live if each.kind == "coordinator"]
    groups = sum(each.kind == "target" and "sequences" in each.gauges for each in live)  # rank 0 of each
    places = sum(gauges.get("max_batch", 0.0) for gauges in coordinators)
    accepted, drafted = (
        _sum(accounts, name) - before for name, before in zip(("accepted", "drafted"), since, strict=True)
    )
    return ScalingLevels(
        queued_rows=sum(gauges.get("waiting_tokens", 0.0) for gauges in coordinators),
        busy=sum(gauges.get("requests_live", 0.0) for gauges in coordinators) / places if places else 0.0,
        groups=groups,
        queue_age_s=max(
            (each.gauges.get("queue_age_seconds", 0.0) for each in live if each.kind == "proposer"), default=0.0
        ),
        acceptance=accepted / drafted if drafted > 0 else None,
    )


class ByQueuedRows:
    """Target groups, and coordinators to drive them: one more while more rows wait than each is to have before it; one
    fewer when nothing waits and the others have room for all that run.
    """

    def __init__(self, rows_each: float = 65_536, full: float = 0.7) -> None:
        self._rows_each, self._full = rows_each, full

    def __call__(self, context: Context) -> tuple[int, dict[str, Any]]:
        """(how many there should be, no state)."""
        number, told = context.target_num_replicas, _told(context)
        if "queued_rows" not in told:
            return number, {}
        if told["queued_rows"] > self._rows_each * number:
            return number + 1, {}
        idle = told["queued_rows"] == 0 and told["busy"] * number <= self._full * (number - 1)
        return number - idle, {}


class ByDrafts:
    """Proposers: one more while hidden rows wait longer than `age_s` in one; one fewer when they hardly wait, or when
    so few drafts are accepted that they earn nothing.
    """

    def __init__(self, age_s: float = 0.05, worth: float = 0.2) -> None:
        self._age_s, self._worth = age_s, worth

    def __call__(self, context: Context) -> tuple[int, dict[str, Any]]:
        """(how many there should be, no state)."""
        number, told = context.target_num_replicas, _told(context)
        if "queue_age_s" not in told:
            return number, {}
        if told.get("acceptance", 1.0) < self._worth:
            return number - 1, {}
        wanted = number
        if told["queue_age_s"] > self._age_s:
            wanted = number + 1
        elif told["queue_age_s"] < self._age_s / 4:
            wanted = number - 1
        return min(wanted, math.ceil(told["groups"]) + SPARE_PROPOSERS), {}


def _told(context: Context) -> dict[str, float]:
    """Each replica tells of the whole service: the largest is believed."""
    return {name: max(said.values()) for name, said in (context.aggregated_metrics or {}).items() if said}


def _sum(accounts: Sequence[Account], name: str) -> float:
    return sum(each.counters.get(name, 0.0) for each in accounts if each.kind == "coordinator")
