"""chaos-report.json and a page that needs nothing else: what ran, what was found, how long streams were silent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from statistics import quantiles
from typing import Any

from seqmtp_serve.fault_points import FaultPoint
from tests.chaos.rig.campaign import FaultResult
from tests.chaos.rig.run import Outcome
from tests.chaos.simulation.sweep import Sweep


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
) -> dict[str, Any]:
    """The whole report as JSON values. `about`: machine, date, model, and what else a reader must know.

    `failed_over`: by durability class, a service whose store failed over to its replica.
    """
    hit = [result for result in outcome.results if not result.missed]
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
        "faults": [_fault(result) for result in outcome.results],
        "longest_silence_s": {
            role: {how: spread(values) for how, values in sorted(by_how.items())}
            for role, by_how in _silences(hit).items()
        },
        "resume_to_first_token_s": spread([value for result in outcome.results for value in result.resumes_s]),
        "commit_ms": {durability: spread(values) for durability, values in commit_ms.items()},
        "store_failed_over": {durability: _failed_over(each) for durability, each in (failed_over or {}).items()},
    }


def _failed_over(outcome: Outcome) -> dict[str, Any]:
    hit = [result for result in outcome.results if not result.missed]
    return {
        "times": len(hit),
        "streams": outcome.num_streams,
        "streams_under_way": sum(len(result.silence_s) for result in hit),
        "rows_shown_that_the_new_primary_lacked": sum(result.num_forgotten for result in hit),
        "longest_silence_s": spread([value for result in hit for value in result.silence_s]),
        "violations": [str(violation) for violation in outcome.violations],
    }


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


def _silences(results: Sequence[FaultResult]) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        found[result.fault.role][result.fault.how] += result.silence_s
    return found


# ---- the page ------------------------------------------------------------------------------------------------------

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #1a1a1a }
table { border-collapse: collapse; margin: .5rem 0 1.5rem } td, th { border: 1px solid #ccc; padding: .25rem .6rem }
th { background: #f2f2f2; text-align: left } td { text-align: right } td:first-child { text-align: left }
.good { color: #0a6b2d; font-weight: 600 } .bad { color: #b00020; font-weight: 600 }
"""


def as_page(report: Mapping[str, Any]) -> str:
    """The report as one HTML file without scripts and without links."""
    rig, simulation = report["rig"], report["simulation"]
    failed_over = report["store_failed_over"]
    violations = len(rig["violations"]) + simulation["schedules_with_violations"]
    violations += sum(len(each["violations"]) for each in failed_over.values())
    verdict = f'<p class="{"bad" if violations else "good"}">{violations} violations</p>'
    parts = [
        "<h1>Exactly once, under faults</h1>",
        verdict,
        _table(("about", ""), [(name, value) for name, value in report["about"].items()]),
        "<h2>Real processes</h2>",
        _table(("", ""), [(name.replace("_", " "), _cell(value)) for name, value in rig.items()]),
        "<h2>Streams by role and point</h2>",
        _matrix(report["faults"]),
        "<h2>Longest silence of a stream after a fault, seconds</h2>",
        _table(
            ("role", "fault", "p50", "p95", "max", "streams"),
            [
                (role, how, values["p50"], values["p95"], values["max"], values["number"])
                for role, by_how in report["longest_silence_s"].items()
                for how, values in by_how.items()
                if values
            ],
        ),
        "<h2>The store fails over to its replica, by durability class</h2>",
        _table(
            ("class", "times", "streams under way", "rows shown that the new primary lacked", "silence p50", "p95"),
            [
                (
                    durability,
                    each["times"],
                    each["streams_under_way"],
                    each["rows_shown_that_the_new_primary_lacked"],
                    *((each["longest_silence_s"] or {}).get(key, "") for key in ("p50", "p95")),
                )
                for durability, each in failed_over.items()
            ],
        ),
        "<h2>Resume to first token, seconds</h2>",
        _spreads({"all": report["resume_to_first_token_s"]}),
        "<h2>One commit by durability class, milliseconds</h2>",
        _spreads(report["commit_ms"]),
        "<h2>Simulation</h2>",
        _table(("", ""), [(name.replace("_", " "), value) for name, value in simulation.items() if name != "met"]),
        _table(("what the schedules met", "times"), list(simulation["met"].items())),
        "<h2>Negative controls: the same checker on services that are wrong on purpose</h2>",
        _table(
            ("control", "schedules", "with violations", "found as"),
            [
                (name, each["schedules"], each["schedules_with_violations"], ", ".join(each["kinds"]))
                for name, each in report["negative_controls"].items()
            ],
        ),
    ]
    head = f'<meta charset="utf-8"><title>Chaos report</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _spreads(by_name: Mapping[str, Mapping[str, float] | None]) -> str:
    rows = [
        (name, *(values[key] for key in ("p50", "p95", "max", "number")))
        for name, values in by_name.items()
        if values is not None
    ]
    return _table(("", "p50", "p95", "max", "number"), rows) if rows else "<p>not measured</p>"


def _matrix(faults: Sequence[Mapping[str, Any]]) -> str:
    """Faulted streams, role by point; a fault whose point nobody reached counts nothing."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for fault in faults:
        if not fault["missed"]:
            counts[fault["role"], fault["point"]] += fault["streams"]
    roles = sorted({fault["role"] for fault in faults})
    points = [point.value for point in FaultPoint]
    return _table(("role", *points), [(role, *(counts[role, point] for point in points)) for role in roles])


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{body}</table>"


def _cell(value: Any) -> Any:
    return (len(value) and "; ".join(value)) or 0 if isinstance(value, list) else value
