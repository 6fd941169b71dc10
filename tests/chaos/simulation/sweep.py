"""Many schedules, one after the other: how many, how fast, and which seeds found something.

python -m tests.chaos.simulation.sweep FIRST COUNT      e.g. 0 5000
python -m tests.chaos.simulation.sweep SEED             one schedule, told from beginning to end
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from time import perf_counter

from tests.chaos.checker import Violation, check
from tests.chaos.simulation.parts import Parts
from tests.chaos.simulation.virtual_loop import Stuck
from tests.chaos.simulation.world import SOUND, replay, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """`failures` by seed; `met` sums what the faults led to."""

    num_schedules: int
    seconds: float
    failures: Mapping[int, tuple[str, ...]]
    kinds: Mapping[str, int]
    met: Mapping[str, int]


def sweep(seeds: Iterable[int], parts: Parts = SOUND) -> Sweep:
    """Simulate each seed and judge it. An invariant of the product that breaks counts as a failure, too."""
    started = perf_counter()
    failures: dict[int, tuple[str, ...]] = {}
    kinds: Counter[str] = Counter()
    met: Counter[str] = Counter()
    num_schedules = 0
    for seed in seeds:
        num_schedules += 1
        found: tuple[Violation, ...] = ()
        try:
            history = simulate(seed, parts)
        except (AssertionError, Stuck) as error:
            failures[seed] = (f"{type(error).__name__}: {error}",)
            kinds["invariant broken"] += 1
        else:
            found = check(history)
            met.update(history.met)
        if found:
            failures[seed] = tuple(map(str, found))
            kinds.update({violation.kind.value for violation in found})
    return Sweep(
        num_schedules=num_schedules,
        seconds=perf_counter() - started,
        failures=failures,
        kinds=dict(kinds),
        met=dict(met),
    )


def main() -> int:
    """0: nothing was found."""
    logging.disable(logging.CRITICAL)
    first, *rest = map(int, sys.argv[1:])
    if not rest:
        happened, history = replay(first)
        for line in (*happened, *history.clients, *history.store):
            print(line)
        found = check(history)
        print("\n".join(map(str, found)) or "no violation")
        return 1 if found else 0
    result = sweep(range(first, first + rest[0]))
    for seed, violations in result.failures.items():
        print(f"seed {seed}: {'; '.join(violations)}")
    print(f"{result.num_schedules} schedules in {result.seconds:.1f} s, {len(result.failures)} with violations")
    return 1 if result.failures else 0


if __name__ == "__main__":
    sys.exit(main())
