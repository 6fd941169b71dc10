"""λ, the weight of the MTP objective, as a schedule over training tokens. No torch."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWeightSchedule:
    """Phases `(first token, λ)`, by rising first token. A phase owns its first token: the boundary is inclusive there.

    There is no default: a run declares its own. Raises ValueError when the first phase does not start at token 0, when
    starts do not rise, or when a weight is negative.
    """

    phases: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.phases]
        if not starts or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
            raise ValueError("phases of the loss weight must start at token 0 and rise")
        if any(weight < 0 for _, weight in self.phases):
            raise ValueError("a loss weight is never negative")

    def at(self, tokens: int) -> float:
        """λ for a step that begins after `tokens` training tokens."""
        return self.phases[bisect_right([start for start, _ in self.phases], tokens) - 1][1]


# As reported for DeepSeek-V3 (arXiv 2412.19437, section 4.2): 0.3 for the first 10T tokens, 0.1 for the other 4.8T. It
# says nothing about another run, least of all about a tiny one.
DEEPSEEK_V3_SCHEDULE = LossWeightSchedule(phases=((0, 0.3), (10_000_000_000_000, 0.1)))
DEEPSEEK_V3_TOKENS = 14_800_000_000_000
