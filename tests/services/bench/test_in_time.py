"""A bench that must end in time measures every cell, and each as often as there is time for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from math import inf

import pytest

from services.bench.in_time import in_time, turns_each


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    repeat: int
    cell: str
    turn: int
    takes_s: float
    weight: float = 1.0


def planned(*takes_s: float, repeats: int = 2, turns: int = 4) -> list[Timed]:
    """Cells a, b, …, each of whose turns takes so long."""
    return [
        Timed(repeat=repeat, cell=cell, turn=turn, takes_s=each)
        for repeat, (cell, each), turn in product(range(repeats), zip("abcdef", takes_s, strict=False), range(turns))
    ]


def measured(turns: list[Timed], seconds: float | None) -> tuple[list[Timed], float]:
    """What is measured, and how long it takes."""
    done: list[Timed] = []

    def now() -> float:
        return sum(turn.takes_s for turn in done)

    for turn in in_time(turns, seconds, now):
        done.append(turn)
    return done, now()


def test_with_time_for_all_everything_is_measured() -> None:
    turns = planned(1.0, 2.0)
    assert measured(turns, None)[0] == turns
    assert measured(turns, 32.0)[0] == turns


@pytest.mark.parametrize("seconds", [8.0, 12.0, 16.0, 20.0])
def test_with_less_each_cell_is_measured_less_often_and_it_ends_in_time(seconds: float) -> None:
    done, took_s = measured(planned(1.0, 2.0), seconds)
    counts = Counter(turn.cell for turn in done)
    assert set(counts) == {"a", "b"}
    assert seconds / 2 < took_s <= seconds
    first = [turn.turn for turn in done if (turn.repeat, turn.cell) == (0, "a")]
    assert first == [0, 1, 2, 3][: len(first)], "the first ones, in their order"


def test_what_a_short_cell_leaves_is_for_the_others() -> None:
    short = [turn for turn in planned(1.0, 1.0, repeats=1, turns=8) if turn.cell == "b" or turn.turn < 2]
    assert measured(short, 10.0)[0] == short


def test_without_any_time_every_cell_is_measured_once() -> None:
    done, _ = measured(planned(5.0, 7.0, 9.0), 0.0)
    assert [(turn.repeat, turn.cell, turn.turn) for turn in done] == [(0, "a", 0), (0, "b", 0), (0, "c", 0)]


def counted(turns: list[Timed]) -> dict[tuple[int, str], int]:
    """Turns of each cell."""
    return dict(Counter((turn.repeat, turn.cell) for turn in turns))


def test_a_cell_of_slow_turns_gets_more_time_and_as_many_turns() -> None:
    """With equal shares the quick one would be measured four times, the slow one once or twice."""
    weighed = [replace(turn, weight=turn.takes_s) for turn in planned(1.0, 5.0)]
    assert counted(measured(weighed, 24.0)[0]) == {(0, "a"): 2, (0, "b"): 2, (1, "a"): 2, (1, "b"): 2}


def test_before_a_cell_was_measured_its_weight_tells_and_then_what_it_took() -> None:
    """b is said to take ten times as long as a: at first a waits for it. It takes as long, so then a need not."""
    weighed = [replace(turn, weight=10.0 if turn.cell == "b" else 1.0) for turn in planned(1.0, 1.0)]
    assert counted(measured(weighed, 12.0)[0]) == {(0, "a"): 1, (0, "b"): 3, (1, "a"): 4, (1, "b"): 4}


def test_a_cell_that_cannot_end_in_time_leaves_its_time_to_the_others() -> None:
    done, took_s = measured(planned(2.0, 9.0), 15.0)
    assert counted(done) == {(0, "a"): 1, (0, "b"): 1, (1, "a"): 2}
    assert took_s == 15.0


def test_turns_each() -> None:
    assert turns_each(10.0, [(4, 1.0), (4, 4.0)]) == 2.0
    assert turns_each(10.0, [(1, 4.0), (8, 1.0)]) == 6.0, "the rest is for the cell that has more turns"
    assert turns_each(0.0, [(1, 4.0)]) == 0.0
    assert turns_each(20.0, [(4, 1.0), (4, 4.0)]) == inf
