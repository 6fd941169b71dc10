"""Pictures of a result as SVG text, for a page that needs no network. Needs matplotlib (`pip install -e '.[load]'`)."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]
LATENCIES = (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "between chunks"), ("e2el", "end to end"))
PERCENTILES = ("median", "p90", "p95", "p99")


def _figure(width: float = 7.5, height: float = 3.0) -> Any:
    from matplotlib.figure import Figure  # no pyplot: no backend, no state

    return Figure(figsize=(width, height), layout="constrained")


def _svg(figure: Any) -> str:
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()[written.getvalue().index("<svg") :]


def over_time(result: Result) -> str:
    """Throughput, TTFT and E[R] as the run went on."""
    rows = result["timeline"]
    figure = _figure(height=5.5)
    drawn = (("output_throughput", "tokens/s"), ("mean_ttft_ms", "TTFT, ms"), ("e_r_verified", "E[R]"))
    axes = figure.subplots(len(drawn), 1, sharex=True)
    for axis, (name, label) in zip(axes, drawn, strict=True):
        known = [(row["at_s"], row[name]) for row in rows if row[name] is not None]
        axis.plot([at for at, _ in known], [value for _, value in known], marker=".", color="tab:blue")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    for row in rows:
        if row["failed"]:
            axes[0].axvline(row["at_s"], color="tab:red", alpha=0.4)
    axes[-1].set_xlabel("seconds; red: failures")
    return _svg(figure)


def latencies(results: Mapping[str, Result]) -> str:
    """Percentiles of each latency, for each of the runs by its name."""
    figure = _figure(height=2.6)
    axes = figure.subplots(1, len(LATENCIES))
    for axis, (key, title) in zip(axes, LATENCIES, strict=True):
        _bars(
            axis,
            {name: [each[f"{one}_{key}_ms"] for one in PERCENTILES] for name, each in results.items()},
            PERCENTILES,
        )
        axis.set_title(f"{title}, ms", fontsize=9)
    axes[0].legend(fontsize=7)
    return _svg(figure)


def speculation(results: Mapping[str, Result]) -> str:
    """E[R] by category, and acceptance by position, unconditional."""
    figure = _figure()
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    names = sorted({name for each in results.values() for name in each["categories"]})
    lengths = {
        name: [(each["categories"].get(one) or {"e_r": {}})["e_r"].get("verified") or 0.0 for one in names]
        for name, each in results.items()
    }
    _bars(left, lengths, names)
    left.axhline(1, color="gray", linewidth=0.8)
    left.set_title("E[R], verified, by category", fontsize=9)
    by_position = {name: each["spec_decode_per_position_acceptance_rates"] for name, each in results.items()}
    depth = max((len(rates) for rates in by_position.values()), default=0)
    padded = {name: [*rates, *[0.0] * (depth - len(rates))] for name, rates in by_position.items()}
    _bars(right, padded, [str(position) for position in range(depth)])
    right.set_title("acceptance by position", fontsize=9)
    right.legend(fontsize=7)
    return _svg(figure)


def throughput(results: Mapping[str, Result]) -> str:
    """Output tokens a second, and the share of requests within the objectives."""
    figure = _figure(height=2.2)
    left, right = figure.subplots(1, 2)
    _bars(left, {name: [each["output_throughput"]] for name, each in results.items()}, ["tokens/s"])
    _bars(right, {name: [each["goodput_ratio"]] for name, each in results.items()}, ["goodput, share"])
    right.set_ylim(0, 1.05)
    left.legend(fontsize=7)
    return _svg(figure)


def _bars(axis: Any, values: Mapping[str, Sequence[float]], labels: Sequence[str]) -> None:
    """Groups of bars, one bar a run."""
    width = 0.8 / max(len(values), 1)
    for number, (name, heights) in enumerate(values.items()):
        places = [place + (number - (len(values) - 1) / 2) * width for place in range(len(labels))]
        axis.bar(places, heights, width, label=name)
    axis.set_xticks(range(len(labels)), labels, fontsize=7, rotation=30 if len(labels) > 4 else 0)
    axis.tick_params(axis="y", labelsize=7)
