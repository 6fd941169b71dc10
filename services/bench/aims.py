"""What was aimed at, beside what was measured: one table, read from the reports of `seqmtp bench all`. Pure.

An aim whose part was not measured, or not of this kind, is stated with `measured` None: it is neither met nor missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """`read` takes the report of `part`. It is met at `least` or above, `most` or below."""

    text: str
    part: str
    read: Callable[[Report], float | None]
    least: float = -inf
    most: float = inf

    def held_against(self, report: Report | None) -> dict[str, Any]:
        """The aim with its figure."""
        value = None if report is None else self.read(report)
        bound = {"at_least": self.least} if self.least > -inf else {"at_most": self.most}
        met = None if value is None else self.least <= value <= self.most
        return {"aim": self.text, "part": self.part, **bound, "measured": value, "met": met}


def held_against_aims(reports: Mapping[str, Report | None]) -> list[dict[str, Any]]:
    """Every aim of the table."""
    return [aim.held_against(reports.get(aim.part)) for aim in AIMS]


def _extreme(choose: Callable[[Iterable[float]], float], values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return choose(known) if known else None


def _best(
    name: str, *, system: str = "", concurrency: int | None = None, more: int = 0
) -> Callable[[Report], float | None]:
    """The largest `name` over depths above 0, of chat; `more`: at concurrencies of at least so many."""

    def read(report: Report) -> float | None:
        runs = report["proposers"] if system else report["runs"]
        return _extreme(
            max,
            (
                run[name]
                for run in runs
                if run["depth"] not in (0, "auto")
                and run["kind"] == "chat"
                and (not system or run["system"] == system)
                and (concurrency is None or run["concurrency"] == concurrency)
                and run["concurrency"] >= more
            ),
        )

    return read


def _of_bound(report: Report) -> float | None:
    """The best depth's speed-up over what free drafts would give at that depth, remote, concurrency 1."""
    runs = [
        run for run in report["proposers"] if run["system"] == "remote" and run["concurrency"] == 1 and run["depth"]
    ]
    best = max(runs, key=lambda run: run["speedup"], default=None)
    return round(best["speedup"] / best["speedup_bound"], 4) if best and best["speedup_bound"] else None


def _worst_auto(report: Report) -> float | None:
    return _extreme(min, (run["of_best_fixed"] for run in report["runs"]))


def _verify_ratio(depth: int) -> Callable[[Report], float | None]:
    def read(report: Report) -> float | None:
        cells = report["cells"]
        return _extreme(
            min, (cell["c_verify_over_c_main"] for cell in cells if (cell["batch"], cell["depth"]) == (1, depth))
        )

    return read


def _plain_tps(batch: int) -> Callable[[Report], float | None]:
    def read(report: Report) -> float | None:
        return _extreme(
            max, (cell["tokens_per_s"] for cell in report["cells"] if (cell["batch"], cell["depth"]) == (batch, 0))
        )

    return read


def _scale(*names: str, streams: int | None = None) -> Callable[[Report], float | None]:
    """A figure of the run with so many streams, else the worst of all runs."""

    def read(report: Report) -> float | None:
        return _extreme(max, (_at(run, names) for run in report["scale"] if streams in (None, run["streams"])))

    return read


def _at(run: Report, names: Iterable[str]) -> float | None:
    found: Any = run
    for name in names:
        found = None if found is None else found.get(name)
    figure: float | None = found
    return figure


def _all_equal(key: str) -> Callable[[Report], float | None]:
    return lambda report: float(all(run["text_equal"] for run in report[key]))


AIMS: tuple[Aim, ...] = (
    Aim(
        text="S at concurrency 1, the module in a process of its own, best depth, against its own depth 0",
        part="proposers",
        read=_best("speedup", system="remote", concurrency=1),
        least=1.4,
    ),
    Aim(text="that S over its bound E[R] * C_main / C_verify", part="proposers", read=_of_bound, least=0.9),
    Aim(
        text="S at concurrency 1 with depth control, the module in a process of its own",
        part="proposers",
        read=_best("speedup", system="remote-auto", concurrency=1),
        least=1.4,
    ),
    Aim(
        text="best speed with the module in a process of its own, over the fastest plain decoding, concurrency 1",
        part="proposers",
        read=_best("of_plain", system="remote", concurrency=1),
        least=1.0,
    ),
    Aim(
        text="speed over the colocated module's, best depth, concurrency 1",
        part="proposers",
        read=_best("of_colocated", system="remote", concurrency=1),
        least=1.0,
    ),
    Aim(
        text="speed over the colocated module's, best depth, two cohorts, concurrency 4 and more",
        part="proposers",
        read=_best("of_colocated", system="remote-2", more=4),
        least=1.0,
    ),
    Aim(
        text="hidden share of all costs but the pass, two cohorts, concurrency 4 and more",
        part="proposers",
        read=_best("hidden_share", system="remote-2", more=4),
        least=0.9,
    ),
    Aim(
        text="texts equal at every depth, in every system (1: all)",
        part="proposers",
        read=_all_equal("proposers"),
        least=1,
    ),
    Aim(text="depth control over the best fixed depth, worst case", part="speculation", read=_worst_auto, least=0.98),
    Aim(text="texts equal at every depth (1: all)", part="speculation", read=_all_equal("runs"), least=1),
    Aim(text="C_verify(2 rows) / C_main", part="engine", read=_verify_ratio(1), most=1.1),
    Aim(text="C_verify(4 rows) / C_main", part="engine", read=_verify_ratio(3), most=1.25),
    Aim(text="v3-tiny, tokens/s without drafts, batch 1", part="engine-v3-tiny", read=_plain_tps(1), least=121),
    Aim(text="v3-tiny, tokens/s without drafts, batch 8", part="engine-v3-tiny", read=_plain_tps(8), least=229),
    Aim(text="texts equal with a known prompt (1: all)", part="prefix", read=_all_equal("prompts"), least=1),
    Aim(
        text="coordinator, processor time a token, microseconds (15,000 tokens/s a process)",
        part="scale",
        read=_scale("cpu_us_a_token", "coordinator"),
        most=66.7,
    ),
    Aim(
        text="time added to a step of 64 requests, ms",
        part="scale",
        read=_scale("added_ms_a_step", streams=64),
        most=1.5,
    ),
    Aim(
        text="emit delay at 1,000 streams, p99, ms",
        part="scale",
        read=_scale("emit_delay_ms", "p99", streams=1000),
        most=20,
    ),
    Aim(
        text="coordinator's memory a stream at 1,000 streams, KiB",
        part="scale",
        read=_scale("kib_a_stream", "coordinator", streams=1000),
        most=64,
    ),
    Aim(text="tokens lost, repeated or altered", part="scale", read=_scale("num_wrong"), most=0),
)
