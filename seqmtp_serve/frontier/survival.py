"""How far drafts survive verification: of one request, or of a group of requests. Counts that slowly forget.

What few drafts say may be wrong, and only more drafts tell. `credit` is what that is worth: the Gittins index of a
Bernoulli arm less its mean, as Brezzi and Lai (2002) approximate it, for the rounds that are left.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log, pi, sqrt
from typing import Literal, NamedTuple

NO_PRIOR = 0.5  # taken for granted of a position nobody has drafted yet
PRIOR_WEIGHT = 8.0  # drafts that this is worth
UNSEEN_FADE = 0.25  # rounds' worth, of a full memory, that is forgotten of a position when a round did not draft it
GROUP_WEIGHT = 24.0  # drafts that a group's rate is worth beside a request's own, at most
LEFT_OUT = 0.2  # of a verified draft's time goes into one that was made and left out
MOST = 0.95  # expected of a position from the ones before it, at most
CREDIT = 0.5  # of the index: every request of a batch is an arm, and one's drafts tell of the others'


class Outlook(NamedTuple):
    """Probability that the drafts up to each position are all accepted: what a draft there adds to E[R].

    Where chains end at a floor: how likely a draft that is asked for is made, and how much of a verified one's time it
    takes.
    """

    expected: tuple[float, ...]
    hoped: tuple[float, ...]  # with credit
    made: tuple[float, ...]
    rows: tuple[float, ...]


@dataclass(slots=True)
class Survival:
    """`reached[j]` rounds whose drafts before j were all accepted and that drafted j; `accepted[j]` of them took it.

    Rates given that a position was reached, so a round that drafted less deep says nothing of deeper positions. A draft
    that was left out counts as not accepted: it brought nothing. `asked[j]` rounds wanted more than j drafts; `made[j]`
    of them made draft j, which took as long as `rows[j]` verified ones. A request's `group` is told of its rounds too.
    """

    memory: float  # rounds; then half of what is known of a position is forgotten
    group: Survival | None = None
    reached: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    asked: list[float] = field(default_factory=list)
    made: list[float] = field(default_factory=list)
    rows: list[float] = field(default_factory=list)

    def add(self, drafted: int, accepted: int, made: int | None = None, verified: int | None = None) -> None:
        """One round that asked for `drafted` drafts; `made` and `verified` of them, else all."""
        if self.group is not None:
            self.group.add(drafted, accepted, made, verified)
        self.fade(UNSEEN_FADE / self.memory, drafted)
        self._count_rows(drafted, drafted if made is None else made, drafted if verified is None else verified)
        for position in range(min(drafted, accepted + 1)):
            if position == len(self.reached):
                self.reached.append(0.0)
                self.accepted.append(0.0)
            if self.reached[position] >= self.memory:
                self.reached[position] /= 2
                self.accepted[position] /= 2
            self.reached[position] += 1
            self.accepted[position] += position < accepted

    def _count_rows(self, drafted: int, made: int, verified: int) -> None:
        for position in range(drafted):
            if position == len(self.asked):
                for counts in (self.asked, self.made, self.rows):
                    counts.append(0.0)
            if self.asked[position] >= self.memory / 2:
                for counts in (self.asked, self.made, self.rows):
                    counts[position] /= 2
            self.asked[position] += 1
            self.made[position] += position < made
            self.rows[position] += num_rows(position < made, position < verified)

    def fade(self, share: float, first: int = 0) -> None:
        """Forget so much of what is known of positions from the `first` on."""
        for position in range(first, len(self.reached)):
            self.reached[position] *= 1 - share
            self.accepted[position] *= 1 - share

    def outlook(self, depth: int, num_rounds: float) -> Outlook:
        """Of the next `depth` drafts, if `num_rounds` are left; own rates are shrunk to those of the group's others.

        A position that nobody has drafted yet is taken to be like the one before, and a request whose drafts fare
        better or worse than the group's at one position to do so at the next.
        """
        expected, hoped = [], []
        usual, alike, sure, lucky = NO_PRIOR, 1.0, 1.0, 1.0
        own_known, group_known = len(self.reached), 0 if self.group is None else len(self.group.reached)
        for position in range(depth):
            reached = accepted = others = others_accepted = 0.0
            if position < own_known:
                reached, accepted = self.reached[position], self.accepted[position]
            if self.group is not None and position < group_known:
                others = max(0.0, self.group.reached[position] - reached)
                others_accepted = min(others, max(0.0, self.group.accepted[position] - accepted))
            known = others + PRIOR_WEIGHT
            usual = (others_accepted + PRIOR_WEIGHT * usual) / known
            weight = GROUP_WEIGHT * known / (GROUP_WEIGHT + known)
            both = reached + weight
            rate = (accepted + weight * min(MOST, usual * alike)) / both
            alike = rate / usual
            sure *= rate
            lucky *= rate + credit(rate, both, num_rounds)
            num_rounds *= rate
            expected.append(round(sure, 4))
            hoped.append(round(lucky, 4))
        return Outlook(tuple(expected), tuple(hoped), self._shares(depth, "made"), self._shares(depth, "rows"))

    def _shares(self, depth: int, counts: Literal["made", "rows"]) -> tuple[float, ...]:
        """Of the drafts that are asked for, position by position, as far as is known: all, at first."""
        shares, share = list[float](), 1.0
        for position in range(depth):
            for one in (self.group, self):
                if one is not None and position < len(one.asked):
                    some = getattr(one, counts)[position]
                    share = (some + PRIOR_WEIGHT * share) / (one.asked[position] + PRIOR_WEIGHT)
            shares.append(round(share, 4))
        return tuple(shares)


def num_rows(made: float, verified: float) -> float:
    """As how many verified drafts these count, by the time they take."""
    return verified + LEFT_OUT * (made - verified)


def credit(rate: float, weight: float, num_rounds: float) -> float:
    """What may be hoped for beyond an acceptance known from `weight` drafts, if it is of use for so many rounds."""
    deviation = sqrt(rate * (1.0 - rate) / (weight + 1.0))
    return min(1.0 - rate, CREDIT * deviation * _boundary(num_rounds / (weight + 1.0)))


def _boundary(s: float) -> float:
    """Psi of "Optimal learning and experimentation in bandit problems", Brezzi and Lai 2002."""
    if s <= 0.2:
        return sqrt(s / 2)
    if s <= 1.0:
        return 0.49 - 0.11 / sqrt(s)
    if s <= 5.0:
        return 0.63 - 0.26 / sqrt(s)
    if s <= 15.0:
        return 0.77 - 0.58 / sqrt(s)
    return sqrt(2 * log(s) - log(log(s)) - log(16 * pi))
