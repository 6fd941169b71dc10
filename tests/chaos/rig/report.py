"""chaos-report.json: what ran, what was found, how long streams were silent. `page.py` makes a page of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import quantiles
from typing import Any

from tests.chaos.rig.campaign import FaultResult
from tests.chaos.rig.run import Outcome
from tests.chaos.simulation.sweep import Sweep

LOSSES = ("kill", "stop", "stay stopped", "black hole", "partition", "stay partitioned")  # without a word before
BARS_S = {"proposer": 2.0, "coordinator": 2.0, "target": 3.0}  # what p95 of a recovery should stay below


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p95, maximum and number of some values; None of none."""
    if not values:
        return None
    ordered = sorted(values)
    cuts = quantiles(ordered, n=100, method="inclusive") if len(ordered) > 1 else [ordered[0]] * 99
    return {
        "p50": round(cuts[49], 4),
        "p95": round(cuts[94], 4),
        "max": round(ordered[-1], 4),
        "number": len(ordered),
    }


def as_json(
    outcome: Outcome,
    simulated: Sweep,
    controls: Mapping[str, Sweep],
    commit_ms: Mapping[str, Sequence[float]],
    about: Mapping[str, str],
    failed_over: Mapping[str, Outcome] | None = None,
    apart: Outcome | str = "not run",
) -> dict[str, Any]:
    """The whole report as JSON values. `about`: machine, date, model, and what else a reader must know.

    `failed_over`: by durability class, a service whose store failed over to its replica. `apart`: a service in network
    namespaces, or why there was none.
    """
    hit = _hit(outcome)
    unplugged = [] if isinstance(apart, str) else _hit(apart)
    return {
        "about": dict(about),
        "simulation": {
            "schedules": simulated.num_schedules,
            "seconds": round(simulated.seconds, 1),
            "schedules_per_minute": round(60 * simulated.num_schedules / simulated.seconds),
            "schedules_with_violations": len(simulated.failures),
            "met": dict(sorted(simulated.met.items())),
        },
        "negative_controls": {
            name: {
                "schedules": sweep.num_schedules,
                "schedules_with_violations": len(sweep.failures),
                "kinds": dict(sorted(sweep.kinds.items())),
            }
            for name, sweep in controls.items()
        },
        "rig": {
            "seconds": round(outcome.seconds, 1),
            "streams": outcome.num_streams,
            "faulted_streams": sum(result.num_streams for result in hit),
            "faulted_streams_under_way": sum(len(result.silence_s) for result in hit),
            "clients_that_hung_up": outcome.num_disconnects,
            "rows_received": outcome.num_rows,
            "entries_in_the_stores_log": outcome.num_commits,
            "violations": [str(violation) for violation in outcome.violations],
        },
        "held": {name: {"before": before, "after": after} for name, (before, after) in sorted(outcome.held.items())},
        "faults": [_fault(result) for result in outcome.results],
        "recovery_s": _recovery([*hit, *unplugged]),
        "longest_silence_s": _silences(hit),
        "resume_to_first_token_s": spread([value for result in outcome.results for value in result.resumes_s]),
        "commit_ms": {durability: spread(values) for durability, values in commit_ms.items()},
        "added_by_class_ms": _added(commit_ms),
        "store_failed_over": {durability: _failed_over(each) for durability, each in (failed_over or {}).items()},
        "network_partitions": {"none, because": apart} if isinstance(apart, str) else _apart(apart),
    }


def _recovery(results: Sequence[FaultResult]) -> dict[str, Any]:
    """By role: the longest silence of each stream under way when one of that role was lost, and the bar for p95."""
    found = {}
    for role in sorted({result.fault.role for result in results}):
        lost = [result for result in results if result.fault.role == role and result.fault.how in LOSSES]
        if (values := spread([value for result in lost for value in result.silence_s])) is not None:
            bar = {"bar_p95": BARS_S[role], "met": values["p95"] < BARS_S[role]} if role in BARS_S else {}
            found[role] = values | bar
    return found


def _added(commit_ms: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """What a class adds to a commit over the first one."""
    spreads = [(name, found) for name, values in commit_ms.items() if (found := spread(values)) is not None]
    return {
        name: {key: round(found[key] - spreads[0][1][key], 4) for key in ("p50", "p95")} for name, found in spreads[1:]
    }


def _common(outcome: Outcome) -> dict[str, Any]:
    hit = _hit(outcome)
    return {
        "times": len(hit),
        "streams": outcome.num_streams,
        "streams_under_way": sum(len(result.silence_s) for result in hit),
        "violations": [str(violation) for violation in outcome.violations],
    }


def _failed_over(outcome: Outcome) -> dict[str, Any]:
    hit = _hit(outcome)
    return _common(outcome) | {
        "rows_shown_that_the_new_primary_lacked": sum(result.num_forgotten for result in hit),
        "longest_silence_s": spread([value for result in hit for value in result.silence_s]),
    }


def _apart(outcome: Outcome) -> dict[str, Any]:
    faults = [_fault(result) for result in outcome.results]
    return _common(outcome) | {"longest_silence_s": _silences(_hit(outcome)), "faults": faults}


def _hit(outcome: Outcome) -> list[FaultResult]:
    return [result for result in outcome.results if not result.missed]


def _fault(result: FaultResult) -> dict[str, Any]:
    fault = result.fault
    return {
        "role": fault.role,
        "how": fault.how,
        "point": fault.point.value,
        "point_of": fault.at,
        "streams": result.num_streams,
        "under_way": len(result.silence_s),
        "connections_broken": len(result.breaks),
        "why": sorted(set(result.breaks)),
        "longest_silence_s": round(max(result.silence_s, default=0.0), 4),
        "missed": result.missed,
    }


def _silences(results: Sequence[FaultResult]) -> dict[str, dict[str, Any]]:
    """By role and fault."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        found[result.fault.role][result.fault.how] += result.silence_s
    return {role: {how: spread(values) for how, values in sorted(by_how.items())} for role, by_how in found.items()}
