"""Rounds as SVG: a lane for the coordinator, the target and the proposer, and a row of tokens above them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

Row = Mapping[str, Any]
WIDTH, LEFT, RIGHT = 1200.0, 100.0, 20.0
LANE, GAP, TOP = 26.0, 12.0, 74.0
LANES = ("coordinator", "target", "proposer")
# part -> (lane, colour); in the order they run in
TARGET_PARTS = (("draft_wait", "#c9b458"), ("pack", "#8457d6"), ("forward", "#2f6fd6"), ("select", "#b28be8"))
SYNC, DRAFTING = "#8b93a1", "#1b9a63"
ORIGINS = {"a": "#1b9a63", "l": "#7cc4a2", "p": "#8457d6", "c": "#cf6a17", "n": "#2f6fd6", "b": "#8b93a1"}
KEYS = (
    *(("target pass", "#2f6fd6"), ("wait for drafts", "#c9b458"), ("pack", "#8457d6"), ("select", "#b28be8")),
    *(("sync", SYNC), ("drafting", DRAFTING)),
)


def draw(rows: Sequence[Row], starts: Sequence[float]) -> str:
    """The picture of these rounds; `starts` are milliseconds. Pure."""
    total = starts[-1] + rows[-1]["timings_ms"]["step"]
    scale = (WIDTH - LEFT - RIGHT) / total
    height = TOP + len(LANES) * (LANE + GAP) + 34
    parts = [piece for row, began in zip(rows, starts, strict=True) for piece in _round(row, began, scale)]
    names = [
        _text(LEFT - 12, TOP + number * (LANE + GAP) + LANE / 2 + 4, name, anchor="end")
        for number, name in enumerate(LANES)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" '
            f'font-family="system-ui, sans-serif" font-size="12">',
            f"<title>{len(rows)} rounds, {total:.0f} ms</title>",
            "<style>rect{shape-rendering:crispEdges}text{fill:#626b79}"
            "@media(prefers-color-scheme:dark){text{fill:#a7b0bd}}</style>",
            *_legend(),
            *names,
            *parts,
            *_axis(total, scale, height),
            "</svg>",
        ]
    )


def _round(row: Row, began: float, scale: float) -> Iterator[str]:
    timings = row["timings_ms"]
    explained = sum(timings.get(part, 0.0) for part, _ in TARGET_PARTS)
    sync = max(0.0, timings["step"] - explained)
    yield from _tokens(row, LEFT + began * scale)
    if sync:
        yield _bar(0, began, sync / 2, scale, SYNC, f"to the target: {sync / 2:.1f} ms")
        yield _bar(
            0, began + sync / 2 + explained, sync / 2, scale, SYNC, f"from the target, commit: {sync / 2:.1f} ms"
        )
    at = began + sync / 2
    drafts_by = at + timings.get("draft_wait", 0.0)
    for part, colour in TARGET_PARTS:
        lasted = timings.get(part, 0.0)
        if lasted:
            yield _bar(1, at, lasted, scale, colour, f"{part.replace('_', ' ')}: {lasted:.1f} ms")
        at += lasted
    drafting = timings.get("mtp", 0.0)
    if drafting and row["drafted"]:
        start = max(0.0, drafts_by - drafting)
        yield _bar(2, start, drafts_by - start, scale, DRAFTING, f"{row['drafted']} drafts: {drafting:.1f} ms")


def _tokens(row: Row, x: float) -> Iterator[str]:
    """A column of cells: tokens that came, then drafts that were not used."""
    unused = max(0, row["drafted"] - len(row["origins"]))
    title = f"version {row['version']}: {row['accepted']} of {row['drafted']} drafts accepted"
    cells = [(ORIGINS.get(origin, "#888"), "none") for origin in row["origins"]] + [("none", "#8b93a1")] * unused
    for number, (fill, stroke) in enumerate(cells):
        y = TOP - 18 - 8 * number
        yield (
            f'<rect x="{x:.1f}" y="{y:.1f}" width="7" height="6" fill="{fill}" stroke="{stroke}">'
            f"<title>{escape(title)}</title></rect>"
        )


def _bar(lane: int, began: float, lasted: float, scale: float, colour: str, title: str) -> str:
    x, y, width = LEFT + began * scale, TOP + lane * (LANE + GAP), max(lasted * scale, 0.5)
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{LANE:.0f}" fill="{colour}">'
        f"<title>{escape(title)}</title></rect>"
    )


def _legend() -> Iterator[str]:
    x = LEFT
    for name, colour in KEYS:
        yield f'<rect x="{x:.0f}" y="6" width="10" height="10" fill="{colour}"/>'
        yield _text(x + 15, 15, name)
        x += 34 + 7 * len(name)


def _axis(total: float, scale: float, height: float) -> Iterator[str]:
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10**9) if total / step <= 12)
    for number in range(int(total // step) + 1):
        x = LEFT + number * step * scale
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{height - 28:.0f}" y2="{height - 22:.0f}" stroke="#8b93a1"/>'
        yield _text(x, height - 8, f"{number * step} ms", anchor="middle")


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
