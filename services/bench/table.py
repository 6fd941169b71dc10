"""A bench report for a person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_HEAD = (
    "depth  conc      tps   E[R]  acceptance        c_main   c_mtp c_verify  c_pack  c_sync       S  S(ledger)  text"
)


def as_table(report: Mapping[str, Any]) -> str:
    """The same figures as the JSON, as lines."""
    return "\n".join(_speculation(report) if "runs" in report else _startup(report))


def _speculation(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"{report['model']}, numerics {report['numerics']}, {report['machine']}, {report['date']}"
    yield ", ".join(f"{name} {value}" for name, value in report["workload"].items())
    yield _HEAD
    for run in report["runs"]:
        rates = " ".join(f"{rate:.2f}" for rate in run["acceptance_by_position"])
        costs = run["ledger_ms"] or {}
        cells = [
            f"{costs.get(name, float('nan')):7.2f}" for name in ("c_main", "c_mtp", "c_verify", "c_pack", "c_sync")
        ]
        by_ledger = "-" if run["speedup_ledger"] is None else f"{run['speedup_ledger']:.2f}"
        equal = "equal" if run["text_equal"] else "DIFFERS"
        yield (
            f"{run['depth']:>5}{run['concurrency']:>6}{run['tps']:>9.1f}{run['e_r']:>7.2f}  {rates:<16}"
            f"{' '.join(cells)} {run['speedup']:>7.2f}{by_ledger:>11}  {equal}"
        )


def _startup(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"{report['model']}, {report['machine']}, {report['date']}"
    yield f"$ {report['command']}"
    yield f"ready after         {report['ready_s']:.1f} s"
    yield f"first token         {report['first_token_s']:.3f} s (then {report['first_token_warm_s']:.3f} s)"
    yield f"memory (PSS)        {report['pss_mib']:.0f} MiB"
    for one in report["processes"]:
        yield f"  {one['pss_mib']:>8.1f}  {one['name']}"
    left = ", ".join(report["left_behind"]) or "nothing"
    yield f"stopped after       {report['stop_s']:.1f} s, left behind: {left}"
