"""`seqmtp bench all`: what a part does, or fails to do, and the aims beside the figures."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seqmtp_serve.errors import InvalidField
from services.bench.aims import AIMS, held_against_aims
from services.bench.every import measure_all, run_part
from services.bench.parts import Part, parts_of
from services.bench.table import as_table

TALKS = "import sys, json; print('half way', file=sys.stderr); print(json.dumps({'scale': [], 'argv': sys.argv[1:]}))"
FAILS = "import sys; print('no weights here', file=sys.stderr); sys.exit(1)"
HANGS = "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler); time.sleep(600)"
BABBLES = "print('not JSON')"


def part(name: str, *argv: str, weight: float = 1.0) -> Part:
    return Part(name=name, argv=argv, weight=weight)


@pytest.mark.parametrize(
    ("script", "limit_s", "outcome", "said"),
    [
        (TALKS, 30.0, "measured", ""),
        (FAILS, 30.0, "failed", "no weights here"),
        (HANGS, 3.0, "out of time", "KeyboardInterrupt"),
        (BABBLES, 30.0, "failed", ""),
    ],
    ids=["measures", "fails", "hangs", "babbles"],
)
async def test_whatever_a_part_does_is_reported(script: str, limit_s: float, outcome: str, said: str) -> None:
    found = await run_part(["scale"], limit_s, command=(sys.executable, "-c", script))
    assert found["outcome"] == outcome
    assert said in found["said"]
    assert (found["report"] is not None) == (outcome == "measured")
    if found["report"]:
        assert found["report"]["argv"] == ["scale", "--json"]


async def test_a_part_that_fails_costs_no_other(tmp_path: Path) -> None:
    """Two real parts: one of a checkpoint that is not there, one that is quick."""
    output = tmp_path / "all.json"
    engine = parts_of("smollm2-135m-instruct", quick=True, only=["engine-v3-tiny"])
    missing = part("prefix", "prefix", str(tmp_path / "nowhere"))
    report = await measure_all("smollm2-135m-instruct", [missing, *engine], seconds=900, output=output)
    assert json.loads(output.read_text()) == json.loads(json.dumps(report))
    assert {name: one["outcome"] for name, one in report["parts"].items()} == {
        "prefix": "failed",
        "engine-v3-tiny": "measured",
    }
    assert not report["complete"]
    assert "nowhere" in report["parts"]["prefix"]["said"]
    speeds = [aim for aim in report["aims"] if aim["part"] == "engine-v3-tiny"]
    assert speeds[0]["measured"] > 0
    assert speeds[0]["met"] == (speeds[0]["measured"] >= 121)
    assert {aim["met"] for aim in report["aims"] if aim["part"] != "engine-v3-tiny"} == {None}
    text = as_table(report)
    assert "out of time" not in text
    assert "not measured" in text


def test_the_parts_to_run() -> None:
    parts = parts_of("some-model", quick=False, only=None)
    assert {aim.part for aim in AIMS} <= {one.name for one in parts}
    assert all("MODEL" not in one.argv for one in parts)
    assert (
        [one.name for one in parts if one.is_told] == ["proposers", "speculation"] == [one.name for one in parts[-2:]]
    )
    assert [one.name for one in parts_of("m", quick=True, only=["hidden", "engine"])] == ["engine", "hidden"]
    with pytest.raises(InvalidField, match="there are engine"):
        parts_of("some-model", quick=False, only=["prose"])


class Machine:
    """Parts run on it in no time, but by its own clock in so many seconds; a told part takes all it is told."""

    def __init__(self, **takes_s: float) -> None:
        self.takes_s, self.now = takes_s, 0.0
        self.limits: dict[str, float] = {}

    def clock(self) -> float:
        return self.now

    async def run(self, argv: Sequence[str], limit_s: float) -> dict[str, Any]:
        name, *rest = argv
        takes_s = float(rest[-1]) if rest else self.takes_s[name]
        self.limits[name] = limit_s
        self.now += min(takes_s, limit_s)
        outcome = "measured" if takes_s <= limit_s else "out of time"
        return {"outcome": outcome, "seconds": min(takes_s, limit_s), "report": None}


@pytest.mark.parametrize(
    ("takes_s", "limits"),
    [
        (
            {"a": 10, "b": 10},
            {"a": 100 * 2 / 10, "b": 90 * 2 / 9, "long": 80 * 3 / 7},
        ),
        ({"a": 18, "b": 30}, {"a": 20, "b": 82 * 2 / 9, "long": (82 - 82 * 2 / 9) * 3 / 7}),
        ({"a": 999, "b": 999}, {"a": 20, "b": 80 * 2 / 9}),
    ],
    ids=["quick", "slow", "stuck"],
)
async def test_shares_are_of_the_time_that_is_left(takes_s: dict[str, float], limits: dict[str, float]) -> None:
    """What one part leaves is for those after it; one may need twice its share; all of it ends in time."""
    short = [part("a", "a", weight=1), part("b", "b", weight=1)]
    told = [part("long", "long", "SECONDS", weight=3), part("last", "last", "SECONDS", weight=4)]
    machine = Machine(**takes_s)
    report = await measure_all("m", [*short, *told], seconds=100, run=machine.run, clock=machine.clock)
    assert {name: machine.limits[name] for name in limits} == pytest.approx(limits)
    assert report["parts"]["long"]["outcome"] == report["parts"]["last"]["outcome"] == "measured"
    assert machine.now <= 100


async def test_a_slow_machine_measures_every_part_in_a_quarter_of_an_hour() -> None:
    """As one was: `hidden` needs more than a part of its weight of the whole, and others need less than theirs."""
    takes_s = {"engine": 50.5, "engine-v3-tiny": 17.7, "prefix": 56.9, "hidden": 81.0, "scale": 42.8}
    parts = parts_of("m", quick=False, only=None)
    named = [replace(one, argv=(one.name, *one.argv[-1:]) if one.is_told else (one.name,)) for one in parts]
    machine = Machine(**takes_s)
    report = await measure_all("m", named, seconds=900, run=machine.run, clock=machine.clock)
    assert report["complete"]
    assert 800 < machine.now <= 900
    assert machine.limits["proposers"] > 252
    assert machine.limits["speculation"] > 360


def run(system: str, depth: int | str, concurrency: int, speedup: float, **more: object) -> dict[str, object]:
    figures = {"kind": "chat", "of_plain": speedup, "of_colocated": None, "hidden_share": None, "text_equal": True}
    bound = {"speedup_bound": 2.0 if depth else None}
    return {
        "system": system,
        "depth": depth,
        "concurrency": concurrency,
        "speedup": speedup,
        **figures,
        **bound,
        **more,
    }


def test_aims_are_read_from_the_runs_they_speak_of() -> None:
    proposers = [
        run("remote", 0, 1, 1.0),
        run("remote", 1, 1, 1.5, of_colocated=1.1),
        run("remote", 2, 1, 1.3),
        run("remote-auto", 2, 1, 1.6),
        run("remote-2", 1, 4, 1.2, hidden_share=0.7, of_colocated=1.4),
        run("colocated", 1, 1, 1.9, text_equal=False),
    ]
    scale = [
        {"streams": 64, "cpu_us_a_token": {"coordinator": 50.0}, "added_ms_a_step": 1.0, "num_wrong": 0},
        {"streams": 1000, "cpu_us_a_token": {"coordinator": 80.0}, "emit_delay_ms": {"p99": 30.0}, "num_wrong": 0},
    ]
    found = held_against_aims({"proposers": {"proposers": proposers}, "scale": {"scale": scale}, "engine": None})
    by_text = {aim["aim"]: (aim["measured"], aim["met"]) for aim in found}
    assert by_text["S at concurrency 1, the module in a process of its own, best depth, against its own depth 0"] == (
        1.5,
        True,
    )
    assert by_text["that S over its bound E[R] * C_main / C_verify"] == (0.75, False)
    assert by_text["S at concurrency 1 with depth control, the module in a process of its own"] == (1.6, True)
    assert by_text["hidden share of all costs but the pass, two cohorts, concurrency 4 and more"] == (0.7, False)
    assert by_text["speed over the colocated module's, best depth, concurrency 1"] == (1.1, True)
    assert by_text["texts equal at every depth, in every system (1: all)"] == (0.0, False)
    costs = "coordinator, processor time a token, microseconds (15,000 tokens/s a process)"
    assert by_text[costs] == (80.0, False)
    assert by_text["time added to a step of 64 requests, ms"] == (1.0, True)
    assert by_text["emit delay at 1,000 streams, p99, ms"] == (30.0, False)
    assert by_text["coordinator's memory a stream at 1,000 streams, KiB"] == (None, None)
    assert by_text["C_verify(2 rows) / C_main"] == (None, None)
