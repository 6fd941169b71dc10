"""The bench's arithmetic against worked examples."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from services.bench import figures
from services.bench.figures import Cell

repeats = count()


def cell(
    depth: int, seconds: float, *, concurrency: int = 1, texts: tuple[str, ...] = ("a",), **counters: float
) -> Cell:
    found = {name.replace("__", "."): value for name, value in counters.items()}
    return Cell(
        depth=depth,
        concurrency=concurrency,
        seconds=seconds,
        num_tokens=100,
        texts=texts,
        counters=found,
        repeat=next(repeats),
    )


def plain(seconds: float = 1.0, **more: Any) -> Cell:
    counts = {"rounds": 100, "progress__verified": 100, "steps__depth0": 100, "cost_ms__main": 1000.0}
    return cell(0, seconds, **(counts | more))


def deep(seconds: float = 0.5, **more: Any) -> Cell:
    counts = {
        "rounds": 100,
        "progress__verified": 185,
        "steps__depth1": 90,
        "steps__depth0": 10,
        "cost_ms__verify": 1000.0,
        "cost_ms__main": 100.0,
        "cost_ms__mtp": 200.0,
        "drafted__pos0": 90,
        "accepted__pos0": 85,
    }
    return cell(1, seconds, **(counts | more))


@pytest.mark.covers(102, 103, 106)
def test_the_worked_example_of_the_speedup_formula() -> None:
    """C_main 10, C_mtp 2, C_verify 11, E[R] 1.85: S = 18.5 / 13."""
    ordinary, speculative = figures.runs([plain(), deep()])
    assert speculative["speedup_ledger"] == pytest.approx(18.5 / 13, abs=1e-4)
    assert speculative["ledger_ms"] == {
        "c_main": 10.0, "c_mtp": 2.0, "c_verify": 11.0, "c_pack": 0.0, "c_sync": 0.0, "c_round": 0.0,
    }  # fmt: skip
    assert speculative["speedup"] == 2.0
    assert speculative["e_r"] == 1.85
    assert (ordinary["speedup"], ordinary["speedup_ledger"], ordinary["e_r"]) == (1.0, 1.0, 1.0)


@pytest.mark.covers(133)
def test_accepted_drafts_that_cost_more_than_they_save_are_no_speed_up() -> None:
    """94 % of the drafts accepted, and the run took longer: both speed-ups are below 1, whatever E[R] is."""
    _, speculative = figures.runs([plain(), deep(seconds=1.25, cost_ms__mtp=1200.0)])
    assert speculative["acceptance_by_position"] == [pytest.approx(85 / 90, abs=1e-4)]
    assert speculative["e_r"] == 1.85
    assert speculative["speedup"] == 0.8
    assert speculative["speedup_ledger"] < 1


@pytest.mark.covers(95)
def test_acceptance_is_unconditional_and_pooled() -> None:
    first = deep(drafted__pos1=90, accepted__pos1=40)
    second = deep(drafted__pos0=10, accepted__pos0=5, drafted__pos1=10, accepted__pos1=0)
    assert figures.acceptance([first, second]) == [0.9, 0.4]


def test_medians_over_repeats_and_each_concurrency_against_its_own_plain_runs() -> None:
    cells = [plain(s) for s in (1.0, 2.0, 9.0)] + [deep(s) for s in (1.0, 1.0, 0.1)]
    cells += [plain(0.5, concurrency=8), deep(0.25, concurrency=8)]
    found = {(run["concurrency"], run["depth"]): run for run in figures.runs(cells)}
    assert list(found) == [(1, 0), (1, 1), (8, 0), (8, 1)]
    assert found[1, 0]["tps"] == 50.0
    assert found[1, 1]["speedup"] == 2.0
    assert found[8, 1]["speedup"] == 2.0


def test_the_controller_is_held_against_the_best_fixed_depth_of_its_kind_and_concurrency() -> None:
    auto = cell(1, 0.55)
    auto = replace(auto, depth="auto")
    cells = [plain(1.0), deep(0.5), auto, plain(0.1, concurrency=8), replace(plain(0.01), kind="random")]
    found = {(run["kind"], run["concurrency"], run["depth"]): run["of_best_fixed"] for run in figures.runs(cells)}
    assert found.pop(("chat", 1, "auto")) == pytest.approx(0.5 / 0.55, abs=1e-4)
    assert set(found.values()) == {None}


def test_the_turns_of_a_repeat_are_one_cell_and_each_a_comparison_of_its_own() -> None:
    """Two turns, the second on a machine twice as slow: the controller is at 0.8 of depth 1 in both."""
    cells = [
        replace(cell(0, seconds, texts=(text,)), depth=depth, repeat=0, turn=turn, cpu_seconds=seconds - 0.1)
        for turn, (text, slow) in enumerate((("a", 1.0), ("b", 2.0)))
        for depth, seconds in ((0, slow), (1, 0.4 * slow), ("auto", 0.5 * slow))
    ]
    plain, _, auto = figures.runs(cells)
    assert (plain["tps"], plain["text_equal"], plain["of_best_fixed_interval"]) == (66.67, True, None)
    assert auto["tps"] == 133.33
    assert (auto["of_best_fixed"], auto["of_best_fixed_interval"], auto["turns"]) == (0.8, [0.8, 0.8], 2)
    assert auto["of_best_fixed_cpu"] == pytest.approx((1.2 - 0.2) / (1.5 - 0.2), abs=1e-4)
    cells[-1] = replace(cells[-1], texts=("c",))
    assert not figures.runs(cells)[2]["text_equal"]


@pytest.mark.covers(72, 157)
def test_one_differing_text_in_one_repeat_shows() -> None:
    cells = [plain(), plain(), deep(), deep(texts=("b",))]
    assert [run["text_equal"] for run in figures.runs(cells)] == [True, False]


def test_without_a_ledger_there_is_no_ledger_figure() -> None:
    found = figures.runs([cell(0, 1.0), cell(2, 0.5)])
    assert [run["ledger_ms"] for run in found] == [None, None]
    assert [run["speedup_ledger"] for run in found] == [None, None]
    assert found[1]["speedup"] == 2.0
