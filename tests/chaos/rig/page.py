"""The report as a page that needs nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from seqmtp_serve.fault_points import FaultPoint

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
    apart = report["network_partitions"]
    violations += sum(len(each["violations"]) for each in failed_over.values()) + len(apart.get("violations", ()))
    verdict = f'<p class="{"bad" if violations else "good"}">{violations} violations</p>'
    parts = [
        "<h1>Exactly once, under faults</h1>",
        verdict,
        _table(("about", ""), [(name, value) for name, value in report["about"].items()]),
        "<h2>Real processes</h2>",
        _table(("", ""), [(name.replace("_", " "), _cell(value)) for name, value in rig.items()]),
        "<h2>Held when idle, before clients hung up and when all was over</h2>",
        _table(
            ("", "before", "after"), [(name, each["before"], each["after"]) for name, each in report["held"].items()]
        ),
        "<h2>Streams by role and point</h2>",
        _matrix(report["faults"]),
        "<h2>Recovery from a loss: longest silence of a stream, seconds</h2>",
        _table(
            ("role", "p50", "p95", "max", "streams", "p95 should be below"),
            [
                (role, *(values[key] for key in ("p50", "p95", "max", "number")), values.get("bar_p95", ""))
                for role, values in report["recovery_s"].items()
            ],
        ),
        "<h2>Longest silence of a stream after each fault, seconds</h2>",
        _silences(report["longest_silence_s"]),
        "<h2>Each worker in a network namespace of its own, one of them unplugged</h2>",
        _partitions(apart),
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
        "<h2>What a class adds to a commit over C1, milliseconds</h2>",
        _table(("class", "p50", "p95"), [(name, *by.values()) for name, by in report["added_by_class_ms"].items()]),
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


def _silences(by_role: Mapping[str, Mapping[str, Mapping[str, float] | None]]) -> str:
    return _table(
        ("role", "fault", "p50", "p95", "max", "streams"),
        [
            (role, how, values["p50"], values["p95"], values["max"], values["number"])
            for role, by_how in by_role.items()
            for how, values in by_how.items()
            if values
        ],
    )


def _partitions(apart: Mapping[str, Any]) -> str:
    if "faults" not in apart:
        return "".join(f"<p>{escape(f'{name} {why}')}</p>" for name, why in apart.items())
    counts = [(name.replace("_", " "), _cell(apart[name])) for name in ("streams", "streams_under_way", "violations")]
    return _table(("", ""), counts) + _silences(apart["longest_silence_s"]) + _matrix(apart["faults"])


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
