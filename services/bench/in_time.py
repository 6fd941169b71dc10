"""Turns of a bench that end in a given time: a slow machine measures every cell less often, not fewer cells. Pure.

A cell is a kind of prompts at a concurrency, in one repeat. Its first turn begins if it would end in time; a further
one only if every cell to come that there is time for can have as many, or all of its own. So the time is shared out by
what a turn takes: what the last of its like took, in this repeat or an earlier one, and before there is one what its
weight says beside those measured. The very first turn of each kind and concurrency is always taken, so the time may be
overrun by those.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import groupby
from math import inf
from statistics import fmean
from time import perf_counter
from typing import Protocol, TypeVar


class Turn(Protocol):
    """Something to measure."""

    @property
    def cell(self) -> Hashable: ...

    @property
    def repeat(self) -> int: ...

    @property
    def weight(self) -> float:
        """How long it takes beside others; above 0."""
        ...


Measured = TypeVar("Measured", bound=Turn)


def in_time(
    turns: Iterable[Measured], seconds: float | None, clock: Callable[[], float] = perf_counter
) -> Iterator[Measured]:
    """Those turns that there is time for, in their order; asking for the next says that one has ended."""
    end = inf if seconds is None else clock() + seconds
    cells = [list(some) for _, some in groupby(turns, key=lambda turn: (turn.repeat, turn.cell))]
    pace: dict[Hashable, float] = {}  # seconds by weight, of the last turn of each kind and concurrency

    def expected_s(turn: Turn) -> float:
        return turn.weight * (pace[turn.cell] if turn.cell in pace else fmean(pace.values()))

    for index, cell in enumerate(cells):
        for num_done, turn in enumerate(cell):
            began = clock()
            if turn.cell in pace:
                left_s, each_s = max(0.0, end - began), expected_s(turn)
                if each_s > left_s:
                    break
                to_come = [
                    (len(one), expected_s(one[0]))
                    for one in cells[index:]
                    if one[0].cell not in pace or expected_s(one[0]) <= left_s
                ]
                if num_done and turns_each(left_s + num_done * each_s, to_come) < num_done + 1:
                    break
            yield turn
            pace[turn.cell] = (clock() - began) / turn.weight


def turns_each(seconds: float, cells: Iterable[tuple[int, float]]) -> float:
    """How often each cell, of so many turns of so many seconds, can be measured, or all its turns if they are fewer.

    Infinity where there is time for all turns.
    """
    fewest_first = sorted(cells)
    once_s = sum(each_s for _, each_s in fewest_first)
    for num_turns, each_s in fewest_first:
        if num_turns * once_s > seconds:
            return seconds / once_s
        seconds -= num_turns * each_s
        once_s -= each_s
    return inf
