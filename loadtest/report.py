"""Totals as JSON under the key names of `vllm bench serve`, as text for the terminal, and as a table for the HTML.

Where vLLM has a name, the value has vLLM's meaning: `itl` is the gap between chunks (here: rounds), `tpot` is per
token. E[R] and the acceptance by category have no name there; they are `e_r` and `categories`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from html import escape
from typing import Any

from loadtest.recovery import recovery
from loadtest.speculation import Speculation
from loadtest.totals import Totals

_PERCENTILES = (50, 90, 95, 99)
_LATENCY_KEYS = {"ttft": "ttft", "tpot": "tpot", "icl": "itl", "e2el": "e2el"}
_E_R = ("verified", "delivered", "seen")
_COLUMNS = ("category", "answers", "rounds", *(f"E[R] {kind}" for kind in _E_R), "acceptance", "by position")


def result_of(totals: Totals, settings: dict[str, Any], spike: tuple[float, float] | None = None) -> dict[str, Any]:
    """One JSON object; `settings` (model, concurrency, depth …) come first in it. `spike`: Unix times, or none."""
    overall, duration = totals.overall, totals.duration_s or float("nan")
    completed = overall.num_answers
    result: dict[str, Any] = {
        **settings,
        "duration": totals.duration_s,
        "completed": completed,
        "failed": totals.num_failed,
        "total_input_tokens": totals.num_prompt_tokens,
        "total_output_tokens": overall.num_tokens,
        "request_throughput": completed / duration if completed else 0.0,
        "request_goodput": totals.num_good / duration if completed else 0.0,
        "output_throughput": overall.num_tokens / duration if completed else 0.0,
        "total_token_throughput": (overall.num_tokens + totals.num_prompt_tokens) / duration if completed else 0.0,
        "goodput_ratio": goodput_ratio(totals),
    }
    for name, key in _LATENCY_KEYS.items():
        latency = totals.latencies[name]
        result |= {f"mean_{key}_ms": latency.mean, f"std_{key}_ms": latency.std}
        result[f"median_{key}_ms"] = latency.percentile(50)
        result |= {f"p{percent}_{key}_ms": latency.percentile(percent) for percent in _PERCENTILES}
    if totals.latencies["lag"].count:
        result |= {"mean_lag_ms": totals.latencies["lag"].mean, "p99_lag_ms": totals.latencies["lag"].percentile(99)}
    result |= {
        "spec_decode_num_drafts": overall.num_rounds,
        "spec_decode_draft_tokens": overall.num_drafted,
        "spec_decode_accepted_tokens": overall.num_accepted,
        "spec_decode_acceptance_rate": overall.acceptance_rate,
        "spec_decode_acceptance_length": overall.verified,
        "spec_decode_per_position_acceptance_rates": overall.acceptance_by_position,
        "e_r": _e_r(overall),
        "categories": {category: _category(each) for category, each in sorted(totals.by_category.items())},
        "timeline": totals.timeline.rows(),
    }
    if spike is not None:
        result["recovery"] = recovery(totals.sendings, spike)
    return result


def goodput_ratio(totals: Totals) -> float:
    """Good answers over all requests, failed ones included; 0 when there were none."""
    num_requests = totals.overall.num_answers + totals.num_failed
    return totals.num_good / num_requests if num_requests else 0.0


def _e_r(each: Speculation) -> dict[str, float | None]:
    return {kind: getattr(each, kind) for kind in _E_R}


def _category(each: Speculation) -> dict[str, Any]:
    return {
        "answers": each.num_answers,
        "output_tokens": each.num_tokens,
        "rounds": each.num_rounds,
        "acceptance_rate": each.acceptance_rate,
        "acceptance_by_position": each.acceptance_by_position,
        "acceptance_histogram": each.histogram,
        "e_r": _e_r(each),
    }


def text_of(result: dict[str, Any]) -> str:
    """A summary for the terminal."""
    lines = [
        "",
        f"{result['completed']} answers, {result['failed']} failed, {result['duration']:.1f} s; "
        f"{result['output_throughput']:.1f} output tokens/s, {result['request_throughput']:.2f} requests/s, "
        f"goodput {result['goodput_ratio']:.1%}",
    ]
    for label, key in (("TTFT", "ttft"), ("TPOT", "tpot"), ("ICL", "itl"), ("E2E", "e2el")):
        mean, median, p99 = (result[f"{statistic}_{key}_ms"] for statistic in ("mean", "median", "p99"))
        lines.append(f"{label:5} mean {mean:8.1f} ms   median {median:8.1f} ms   p99 {p99:8.1f} ms")
    if "recovery" in result:
        lines.append(recovery_line(result["recovery"]))
    rows = [_COLUMNS, *_table(result)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines += ["", *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def recovery_line(found: dict[str, Any]) -> str:
    """A sentence on the time after a spike."""
    before, during = found["before"], found["during"]
    back = "not within the run" if found["recovered_s"] is None else f"{found['recovered_s']:.1f} s after its end"
    return (
        f"spike of {found['spike_s']:.0f} s, p95 of TTFT {before['p95_ttft_ms']:.0f} ms before it and "
        f"{during['p95_ttft_ms']:.0f} ms in it: as before {back}; nothing of it waited after {found['backlog_s']:.1f} s"
    )


def csv_of(result: dict[str, Any]) -> str:
    """Names and one row: what is one value, and the parts of E[R] and of the recovery as `e_r.verified` and so on."""
    flat = dict(_flat(result, ""))
    written = io.StringIO()
    writer = csv.DictWriter(written, flat, lineterminator="\n")
    writer.writeheader()
    writer.writerow(flat)
    return written.getvalue()


def _flat(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and name != "categories":
            yield from _flat(value, f"{prefix}{name}.")
        elif not isinstance(value, dict | list):
            yield prefix + name, value


def html_of(result: dict[str, Any], pictures: str = "") -> str:
    """The summary as an HTML section, to stand below Locust's own report; `pictures` are SVG."""
    head = "".join(f"<th>{escape(column)}</th>" for column in _COLUMNS)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in _table(result))
    first_line = text_of(result).strip().splitlines()[0]
    return (
        '<section style="font-family:sans-serif;margin:2rem"><h2>Speculation</h2>'
        f"<p>{escape(first_line)}</p>{_phases(result.get('recovery'))}"
        "<p>verified = 1 + accepted / rounds; delivered counts tokens after stops and budgets; seen is from chunks "
        "alone. The first token of an answer belongs to no round.</p>"
        f'<table border="1" cellpadding="6" style="border-collapse:collapse"><tr>{head}</tr>{body}</table>'
        f"{pictures}</section>"
    )


def _phases(found: dict[str, Any] | None) -> str:
    """Before, during and after a spike side by side, and how long it took; empty without one."""
    if found is None:
        return ""
    phases = ("before", "during", "after")
    head = "".join(f"<th>{escape(name)}</th>" for name in ("", *phases))
    body = "".join(
        f"<tr><td>{escape(name)}</td>" + "".join(f"<td>{found[phase][name]:.4g}</td>" for phase in phases) + "</tr>"
        for name in found["before"]
    )
    table = f'<table border="1" cellpadding="6" style="border-collapse:collapse"><tr>{head}</tr>{body}</table>'
    return f"<h3>Recovery</h3><p>{escape(recovery_line(found))}</p>{table}"


def _table(result: dict[str, Any]) -> list[tuple[str, ...]]:
    overall = {
        "answers": result["completed"],
        "rounds": result["spec_decode_num_drafts"],
        "acceptance_rate": result["spec_decode_acceptance_rate"],
        "acceptance_by_position": result["spec_decode_per_position_acceptance_rates"],
        "e_r": result["e_r"],
    }
    rows = [*result["categories"].items(), ("together", overall)]
    return [
        (
            name,
            str(each["answers"]),
            str(each["rounds"]),
            *(_number(each["e_r"][kind]) for kind in _E_R),
            _number(each["acceptance_rate"]),
            " ".join(_number(rate) for rate in each["acceptance_by_position"]) or "-",
        )
        for name, each in rows
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
