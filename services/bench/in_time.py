"""Turns of a bench that end in a given time: a slow machine measures every cell less often, not fewer cells. Pure.

A cell is a kind of prompts at a concurrency, in one repeat. What is left of the time is shared out among the cells to
come as each begins, and a turn begins only if one as long as the last of its like would end in the cell's share. The
first turn of each is always taken, so the time may be overrun, by what is left of it then.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import groupby
from math import inf
from time import perf_counter
from typing import Protocol, TypeVar


class Turn(Protocol):
    """Something to measure."""

    @property
    def cell(self) -> Hashable: ...

    @property
    def repeat(self) -> int: ...


Measured = TypeVar("Measured", bound=Turn)


def in_time(
    turns: Iterable[Measured], seconds: float | None, clock: Callable[[], float] = perf_counter
) -> Iterator[Measured]:
    """Those turns that there is time for, in their order; asking for the next says that one has ended."""
    end = inf if seconds is None else clock() + seconds
    cells = [list(some) for _, some in groupby(turns, key=lambda turn: (turn.repeat, turn.cell))]
    took_s: dict[Hashable, float] = {}
    for index, cell in enumerate(cells):
        now = clock()
        until = now + (end - now) / (len(cells) - index)
        for turn in cell:
            began = clock()
            if turn.cell in took_s and began + took_s[turn.cell] > until:
                break
            yield turn
            took_s[turn.cell] = clock() - began
