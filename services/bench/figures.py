"""From measured cells to the bench's figures. Pure.

A cell is one pass over prompts at one depth and concurrency; a repeat measures all prompts in every cell, in one pass
or in several turns, so slow drift of the machine meets all of them. `tps` and costs are medians over repeats, counts
are pooled. `tps` is end to end: tokens of all replies over the wall time of the pass, prefill included.

    speedup          tps at this depth / tps at depth 0, same concurrency
    speedup_ledger   E[R] * C_main / (C_mtp + C_verify + C_pack + C_sync + C_round), where C_main is the whole ordinary
                     round: packing and commit are paid on both sides (`ledger.py`)
    speedup_bound    E[R] * C_main / C_verify, C_main here the pass alone: what drafts that cost nothing would give
    hidden_share     how much of a round but its pass hid behind another (`ledger.py`)
    of_best_fixed    speed of `auto` / that of the best fixed depth, same prompts, concurrency and turns (`paired.py`)
    of_best_fixed_interval, turns   where 95 % of what other turns could have said lies, and how many turns there were
    of_best_fixed_cpu, ..._interval   the same of processor time, which other work on the machine hardly changes
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from statistics import median
from typing import Any

from seqmtp_serve.frontier.ledger import RoundCosts, hidden_share, speedup
from services.bench.backend import Depth
from services.bench.paired import of_best

COST_NAMES = ("main", "mtp", "verify", "pack", "sync", "round")
OVERLAP = ("overlap.wall_ms", "overlap.pass_ms", "overlap.other_ms")
OF_BEST = ("turns", "of_best_fixed", "of_best_fixed_interval", "of_best_fixed_cpu", "of_best_fixed_cpu_interval")
HIDDEN = ("hidden.rows", "hidden.bytes", "hidden.ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """`counters` are differences over the pass: nothing else may use the system meanwhile."""

    depth: Depth
    concurrency: int
    seconds: float
    num_tokens: int
    texts: tuple[str, ...]
    counters: Mapping[str, float]
    kind: str = "chat"  # of prompts
    repeat: int = 0
    turn: int = 0
    cpu_seconds: float | None = None  # None: it computes elsewhere too

    @property
    def tps(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def costs(self) -> RoundCosts | None:
        """Mean costs of a step of nothing but rounds, ms; None when the ledger saw none.

        A request's last rounds may be asked at a lower depth, where the pass is entered as `main`: it is this depth's
        cost all the same.
        """
        steps = sum(value for name, value in self.counters.items() if name.startswith("steps.depth"))
        if not steps:
            return None
        costs = RoundCosts(**{name: self.counters.get(f"cost_ms.{name}", 0.0) / steps for name in COST_NAMES})
        return replace(costs, main=0.0, verify=costs.main + costs.verify) if self.depth else costs


def runs(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """One entry a kind of prompt, concurrency and depth, in the bench's JSON shape. Each needs its depth 0."""
    whole = _repeats(cells)
    keys = dict.fromkeys((cell.kind, cell.concurrency, cell.depth) for cell in sorted(whole, key=_order))
    found = [_run([cell for cell in whole if (cell.kind, cell.concurrency, cell.depth) == key], whole) for key in keys]
    for run in found:
        turns = [cell for cell in cells if (cell.kind, cell.concurrency) == (run["kind"], run["concurrency"])]
        run |= _of_best_fixed(turns) if run["depth"] == "auto" else dict.fromkeys(OF_BEST)
    return found


def _repeats(cells: Sequence[Cell]) -> list[Cell]:
    """The turns of each repeat as one cell."""
    parts: defaultdict[tuple[Any, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        parts[cell.kind, cell.concurrency, cell.depth, cell.repeat].append(cell)
    return [
        replace(
            some[0],
            seconds=sum(cell.seconds for cell in some),
            cpu_seconds=None,
            num_tokens=sum(cell.num_tokens for cell in some),
            texts=tuple(text for cell in some for text in cell.texts),
            counters={
                name: _sum(some, name) for name in dict.fromkeys(name for cell in some for name in cell.counters)
            },
        )
        for some in parts.values()
    ]


def _order(cell: Cell) -> tuple[str, int, float]:
    return cell.kind, cell.concurrency, inf if cell.depth == "auto" else cell.depth


def _run(mine: Sequence[Cell], cells: Sequence[Cell]) -> dict[str, Any]:
    kind, depth, concurrency = mine[0].kind, mine[0].depth, mine[0].concurrency
    others = [cell for cell in cells if cell.kind == kind and cell.concurrency == concurrency]
    plain = [cell for cell in others if cell.depth == 0]
    reference = max((cell.texts for cell in cells if cell.kind == kind and cell.depth == 0), key=len)
    costs, plain_costs = _median_costs(mine), _median_costs(plain)
    progress = expected_r(mine)
    by_ledger = speedup(progress, plain_costs.total, costs) if costs and plain_costs else None
    return {
        "kind": kind,
        "depth": depth,
        "concurrency": concurrency,
        "tps": round(median(cell.tps for cell in mine), 2),
        "e_r": round(progress, 4),
        "acceptance_by_position": [round(rate, 4) for rate in acceptance(mine)],
        "ledger_ms": _ledger(costs, plain_costs),
        "speedup": round(median(cell.tps for cell in mine) / median(cell.tps for cell in plain), 4),
        "speedup_ledger": _rounded(by_ledger),
        "speedup_bound": _rounded(_bound(progress, costs, plain_costs) if depth else None),
        "hidden_share": _rounded(hidden_share({name: _sum(mine, name) for name in OVERLAP})),
        "text_equal": all(cell.texts == reference[: len(cell.texts)] for cell in mine),
    }


def _bound(progress: float, costs: RoundCosts | None, plain: RoundCosts | None) -> float | None:
    return None if costs is None or plain is None or not costs.verify else progress * plain.main / costs.verify


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _of_best_fixed(turns: Sequence[Cell]) -> dict[str, Any]:
    """The controller against the fixed depth that is best, which nobody knew before; turn by turn."""
    by_depth: defaultdict[Depth, list[Cell]] = defaultdict(list)
    for cell in sorted(turns, key=lambda cell: (cell.repeat, cell.turn)):
        by_depth[cell.depth].append(cell)
    wall = _compared({depth: [cell.seconds for cell in some] for depth, some in by_depth.items()})
    cpu = {depth: [cell.cpu_seconds for cell in some if cell.cpu_seconds] for depth, some in by_depth.items()}
    num_turns = len(by_depth["auto"])
    of_cpu = _compared(cpu) if all(len(some) == num_turns for some in cpu.values()) else (None, None)
    return dict(zip(OF_BEST, (num_turns, *wall, *of_cpu), strict=True))


def _compared(times: Mapping[Depth, Sequence[float]]) -> tuple[float, list[float] | None]:
    found = of_best(times["auto"], [some for depth, some in times.items() if depth != "auto"])
    return round(found.estimate, 4), found.interval and [round(bound, 4) for bound in found.interval]


def expected_r(cells: Iterable[Cell]) -> float:
    """E[R] as verified: tokens chosen over rounds (bootstrap apart)."""
    cells = list(cells)
    num_rounds = _sum(cells, "rounds")
    return _sum(cells, "progress.verified") / num_rounds if num_rounds else 1.0


def acceptance(cells: Iterable[Cell]) -> list[float]:
    """By position, unconditional: rounds that accepted it over rounds that drafted it."""
    cells, rates = list(cells), list[float]()
    while drafted := _sum(cells, f"drafted.pos{len(rates)}"):
        rates.append(_sum(cells, f"accepted.pos{len(rates)}") / drafted)
    return rates


def _sum(cells: Iterable[Cell], name: str) -> float:
    return sum(cell.counters.get(name, 0.0) for cell in cells)


def _median_costs(cells: Iterable[Cell]) -> RoundCosts | None:
    known = [asdict(cell.costs) for cell in cells if cell.costs is not None]
    return RoundCosts(**{name: median(costs[name] for costs in known) for name in COST_NAMES}) if known else None


def _ledger(costs: RoundCosts | None, plain: RoundCosts | None) -> dict[str, float] | None:
    """`c_main` is the ordinary pass of the same concurrency: the one this depth is compared with."""
    if costs is None or plain is None:
        return None
    stated = {f"c_{name}": round(getattr(costs, name), 4) for name in COST_NAMES}
    return stated | {"c_main": round(plain.main, 4)}
