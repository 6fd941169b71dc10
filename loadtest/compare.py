"""`make load-compare A=url B=url`: the same load against two servers, one after the other, and a page beside it.

    python -m loadtest.compare --a http://127.0.0.1:8000 --b http://127.0.0.1:8001 --users 8 --run-time 60s
    python -m loadtest.compare --a URL --b URL --a-flags="--depth 0"       # speculation off and on, on one server

Every other flag goes to `loadtest.run`, the same for both. Any server with OpenAI's API can be A or B (B / A is shown);
E[R] needs one that tells of it. Exit code: 0 only if both runs had it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from loadtest import plots, run

ROWS = (
    ("output tokens/s", "output_throughput"),
    ("requests/s", "request_throughput"),
    ("goodput, share", "goodput_ratio"),
    ("median TTFT, ms", "median_ttft_ms"),
    ("p99 TTFT, ms", "p99_ttft_ms"),
    ("median TPOT, ms", "median_tpot_ms"),
    ("p99 TPOT, ms", "p99_tpot_ms"),
    ("median between chunks, ms", "median_itl_ms"),
    ("median end to end, ms", "median_e2el_ms"),
    ("E[R], verified", "spec_decode_acceptance_length"),
    ("acceptance rate", "spec_decode_acceptance_rate"),
    ("failed", "failed"),
)


def main(arguments: list[str] | None = None) -> int:
    """Run both, and write compare.json and compare.html."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.compare", description="All other flags go to both runs.", allow_abbrev=False
    )
    parser.add_argument("--a", required=True, help="URL of the first server")
    parser.add_argument("--b", required=True, help="URL of the second server")
    parser.add_argument("--a-name", default="A")
    parser.add_argument("--b-name", default="B")
    parser.add_argument("--a-flags", default="", help="more flags for A alone")
    parser.add_argument("--b-flags", default="", help="more flags for B alone")
    parser.add_argument("--results", type=Path, default=Path("results/compare"))
    options, shared = parser.parse_known_args(arguments)
    results, codes = {}, []
    for side in ("a", "b"):
        folder, name = options.results / side, getattr(options, f"{side}_name")
        own = shlex.split(getattr(options, f"{side}_flags"))
        codes.append(run.main(["--host", getattr(options, side), "--results", str(folder), *shared, *own]))
        if not (folder / "load.json").exists():
            return max(codes)
        results[name] = json.loads((folder / "load.json").read_text(encoding="utf-8"))
    compared = {"rows": table(*results.values()), "names": list(results), "results": results}
    (options.results / "compare.json").write_text(json.dumps(compared, indent=2) + "\n", encoding="utf-8")
    (options.results / "compare.html").write_text(page(results), encoding="utf-8")
    for label, a, b, ratio in compared["rows"]:
        print(f"{label:26} {shown(a):>10} {shown(b):>10} {shown(ratio):>8}", file=sys.stderr)
    print(f"Results: {options.results}/compare.html, compare.json", file=sys.stderr)
    return max(codes)


def table(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[list[Any]]:
    """[label, A, B, B / A]; a ratio only where both are known and A is not 0. Pure."""
    rows = []
    for label, key in ROWS:
        one, other = a.get(key), b.get(key)
        ratio = other / one if one and other is not None else None
        rows.append([label, one, other, ratio])
    return rows


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """One HTML page without anything from elsewhere."""
    head = "".join(f"<th>{escape(name)}</th>" for name in ("", *results, "ratio"))
    rows = table(*results.values())
    body = "".join(
        f"<tr><td>{escape(label)}</td>" + "".join(f"<td>{shown(value)}</td>" for value in values) + "</tr>"
        for label, *values in rows
    )
    hosts = ", ".join(f"{escape(name)} = {escape(str(each['host']))}" for name, each in results.items())
    pictures = "".join((plots.throughput(results), plots.latencies(results), plots.speculation(results)))
    return (
        '<!doctype html><meta charset="utf-8"><title>Two servers under the same load</title>'
        '<body style="font-family:sans-serif;margin:2rem;max-width:60rem"><h1>Two servers under the same load</h1>'
        f"<p>{hosts}; one after the other, from one client machine.</p>"
        f'<table border="1" cellpadding="6" style="border-collapse:collapse"><tr>{head}</tr>{body}</table>'
        f"{pictures}</body>\n"
    )


def shown(value: float | None) -> str:
    """A number for people."""
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
