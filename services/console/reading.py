"""Two looks at /board: what was counted between them, and what changed. Pure; the page's `reading.js` is its twin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Reading = Mapping[str, Any]
ROLES = {"target": "target group", "proposer": "proposer", "coordinator": "coordinator"}
SIDES = {
    "mtp": ("no drafts: plain decoding goes on", "drafts are back"),
    "target": ("no target group: requests wait", "target passes are back"),
    "store": ("the store does not answer", "the store is back"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What happened in `seconds`, over all coordinators. Rates are None where nothing was counted."""

    seconds: float
    tokens: int
    expected_progress: float | None
    acceptance: tuple[float, ...]  # by position, of the drafts made there
    cost_ms: Mapping[str, float]  # milliseconds in all, by part
    running: int
    waiting: int

    @property
    def tokens_per_s(self) -> float:
        """Committed tokens a second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def figures(before: Reading | None, after: Reading, seconds: float) -> Figures:
    """The difference of two looks, each coordinator by itself: one may be new. `before` None: since their start."""
    known = {one["id"]: one["totals"] for one in (before or {"coordinators": []})["coordinators"]}
    pairs = [(known.get(one["id"]), one["totals"]) for one in after["coordinators"]]

    def count(name: str) -> int:
        return sum(now[name] - (old[name] if old else 0) for old, now in pairs)

    def at(position: int, name: str) -> int:
        def value(totals: Reading | None) -> int:
            places = totals["positions"] if totals else []
            return int(places[position][name]) if position < len(places) else 0

        return sum(value(now) - value(old) for old, now in pairs)

    depth = max((len(now["positions"]) for _, now in pairs), default=0)
    parts = {part for _, now in pairs for part in now["cost_ms"]}
    rounds = count("rounds")
    return Figures(
        seconds=seconds,
        tokens=count("tokens"),
        expected_progress=1 + count("accepted") / rounds if rounds else None,
        acceptance=tuple(
            at(position, "accepted") / drafted if (drafted := at(position, "drafted")) else 0.0
            for position in range(depth)
        ),
        cost_ms={
            part: sum(
                now["cost_ms"].get(part, 0.0) - (old["cost_ms"].get(part, 0.0) if old else 0.0) for old, now in pairs
            )
            for part in sorted(parts)
        },
        running=sum(one["running"] for one in after["coordinators"]),
        waiting=sum(one["waiting"] for one in after["coordinators"]),
    )


def news(before: Reading | None, after: Reading) -> Iterator[str]:
    """What a person should hear of."""
    if before is None:
        return
    old, now = ({worker["id"]: worker["kind"] for worker in look["workers"]} for look in (before, after))
    for name in sorted(old.keys() - now.keys()):
        yield f"{ROLES.get(old[name], old[name])} {short(name)} left"
    for name in sorted(now.keys() - old.keys()):
        yield f"{ROLES.get(now[name], now[name])} {short(name)} is here"
    for side, (away, back) in SIDES.items():
        was, is_now = (_holds(look, side) for look in (before, after))
        if was != is_now:
            yield back if is_now else away


def _holds(look: Reading, side: str) -> bool:
    """Whether the side is ready. Without a target nothing is decoded, so drafts are not what is missing."""
    is_ready = any(one[side]["ready"] for one in look["coordinators"])
    return is_ready or (side == "mtp" and not _holds(look, "target"))


def short(name: str) -> str:
    """A worker's id without its kind, as far as one needs it."""
    return name.partition("-")[2][:6] or name[:6]
