"""One way of doing things against the best of several others, measured side by side in turns. Pure.

The best of several is also the luckiest of them, so it is not chosen by what it is then compared with: the other that
is fastest in one half of the turns is the one that counts in the other half, over many halvings. Within a turn all do
the same work one right after the other, so what they share, a slow minute of the machine, is in none of the ratios.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

HALVINGS = 5
RESAMPLES = 1000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How many times as fast as the best; its bootstrap interval over turns, where there are several."""

    estimate: float
    interval: tuple[float, float] | None = None


def of_best(mine: Sequence[float], others: Sequence[Sequence[float]]) -> Comparison:
    """Of times by turn, ours and those of each other way. One turn cannot be halved: then the luckiest counts."""
    random, num_turns = Random(0), len(mine)
    assert all(len(one) == num_turns for one in others), "every turn has each of them once"
    if num_turns < 2:
        return Comparison(estimate=min(map(sum, others)) / sum(mine))
    turns = range(num_turns)
    estimate = _mean([_halved(turns, mine, others, random) for _ in range(10 * HALVINGS)])
    resampled = sorted(
        _mean([_halved(drawn, mine, others, random) for _ in range(HALVINGS)])
        for drawn in (random.choices(turns, k=num_turns) for _ in range(RESAMPLES))
    )
    tail = round((1 - CONFIDENCE) / 2 * RESAMPLES)
    return Comparison(estimate=estimate, interval=(resampled[tail], resampled[-1 - tail]))


def _halved(turns: Sequence[int], mine: Sequence[float], others: Sequence[Sequence[float]], random: Random) -> float:
    """Choose by one half, compare on the other, and the other way round."""
    shuffled = random.sample(turns, len(turns))
    halves = shuffled[: len(turns) // 2], shuffled[len(turns) // 2 :]
    theirs = ours = 0.0
    for chosen_by, compared_on in (halves, halves[::-1]):
        best = min(others, key=lambda one: sum(one[turn] for turn in chosen_by))
        theirs += sum(best[turn] for turn in compared_on)
        ours += sum(mine[turn] for turn in compared_on)
    return theirs / ours


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
