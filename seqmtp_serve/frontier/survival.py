"""How far drafts survive verification: of one request, or of all requests together. Counts that slowly forget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

NO_PRIOR = 0.6  # taken for granted of a position nobody has drafted yet
PRIOR_WEIGHT = 4.0  # drafts that this is worth
GROUP_WEIGHT = 32.0  # drafts that the group's rate is worth beside a request's own


@dataclass(slots=True)
class Survival:
    """`reached[j]` rounds whose drafts before j were all accepted and that drafted j; `accepted[j]` of them took it.

    Rates given that a position was reached, so a round that drafted less deep says nothing of deeper positions.
    """

    memory: float  # rounds; then half of what is known of a position is forgotten
    reached: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def add(self, drafted: int, accepted: int) -> None:
        """One round."""
        for position in range(min(drafted, accepted + 1)):
            if position == len(self.reached):
                self.reached.append(0.0)
                self.accepted.append(0.0)
            if self.reached[position] >= self.memory:
                self.reached[position] /= 2
                self.accepted[position] /= 2
            self.reached[position] += 1
            self.accepted[position] += position < accepted

    def rates(self, depth: int, prior: Sequence[float] = (), weight: float = PRIOR_WEIGHT) -> tuple[float, ...]:
        """Acceptance of each position once it is reached, shrunk to `prior` as if that were `weight` rounds."""
        found = []
        for position in range(depth):
            expected = prior[position] if position < len(prior) else NO_PRIOR
            reached, accepted = self._counts(position)
            found.append((accepted + weight * expected) / (reached + weight))
        return tuple(found)

    def _counts(self, position: int) -> tuple[float, float]:
        if position >= len(self.reached):
            return 0.0, 0.0
        return self.reached[position], self.accepted[position]


def survivals(rates: Sequence[float]) -> tuple[float, ...]:
    """Probability that the drafts up to each position are all accepted: what a draft there adds to E[R]."""
    found, product = [], 1.0
    for rate in rates:
        product *= rate
        found.append(product)
    return tuple(found)
