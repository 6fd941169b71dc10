"""The live picture of a run: `progress.svg`, drawn anew from its log every so often. Needs matplotlib."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PICTURE = "progress.svg"
_POINTS = 600  # at most so many steps are drawn


def draw_progress(folder: Path, *, every_s: float) -> bool:
    """Draw unless a picture younger than `every_s` is there, or matplotlib is not. Returns whether it drew.

    The file is replaced by rename, so a viewer never sees half of one.
    """
    picture, log = folder / PICTURE, folder / "log.jsonl"
    if not log.exists() or (picture.exists() and time.time() - picture.stat().st_mtime < every_s):
        return False
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    lines = thinned([json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()], _POINTS)
    figure = Figure(figsize=(11, 7), layout="constrained")
    (loss, accuracy), (gradient, load) = figure.subplots(2, 2)
    x = [line["tokens"] / 1e6 for line in lines]
    depths = range(len(lines[-1]["mtp"]))
    form = lines[-1]["mtp_form"]
    loss.plot(x, [line["main"]["loss"] for line in lines], label="main")
    accuracy.plot(x, [line["main"]["accuracy"] for line in lines], label="main")
    for k in depths:
        loss.plot(x, [line["mtp"][k]["loss"] for line in lines], label=f"MTP depth {k + 1} ({form})")
        accuracy.plot(x, [line["mtp"][k]["accuracy"] for line in lines], label=f"MTP depth {k + 1}")
    gradient.plot(x, [line["gradient_norm"] for line in lines], label="all, before clipping")
    for name in lines[-1]["shared_gradients"]:
        gradient.plot(x, [line["shared_gradients"][name] for line in lines], label=name.replace("_", " "))
    gradient.plot(x, [line["loss_weight"] for line in lines], label="λ", linestyle=":")
    for name in lines[-1]["expert_load"]:
        load.plot(x, [imbalance(line["expert_load"][name]) for line in lines], label=name)
    for axes, title in ((loss, "nats a token"), (accuracy, "accuracy"), (gradient, "L2 norms, λ"), (load, "experts")):
        axes.set_title(title)
        axes.set_xlabel("million tokens")
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    gradient.set_yscale("log")
    load.set_title("busiest expert over the mean")
    partial = picture.with_suffix(".partial")
    figure.savefig(partial, format="svg")
    partial.replace(picture)
    return True


def thinned(lines: Sequence[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """At most `most` lines, evenly spread, the last among them."""
    step = max(1, -(-len(lines) // most))
    return list(lines[::-1][::step])[::-1]


def imbalance(load: Sequence[int]) -> float:
    """Rows of the busiest expert over the mean: 1 is even."""
    return max(load) * len(load) / max(1, sum(load))
