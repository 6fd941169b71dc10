"""Drafts copied from a request's own text: where its newest tokens stood before, and what followed there.

Prompt lookup decoding (Saxena, 2023: github.com/apoorvumang/prompt-lookup-decoding) beside a trained drafter, as
SuffixDecoding (Oliaro et al., arXiv 2411.04975) does. A module that reads one hidden row cannot see far back; a copy
costs no pass and may hold tokens that are not in the module's draft vocabulary.

A round's drafts are a copy when copies after as long a match are expected to be right oftener than the module is. Both
rates begin at what was measured and follow this request's own rounds, so a request that does not repeat itself, or a
module that is seldom wrong, stops copying. Whoever chooses how many copied drafts are worth their rows is told how
often so many are right. Depends on the tokens of the request and on its rounds alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LOOKBACK = 16_384  # tokens: bounds the time of a search
PRIOR_ROUNDS = 8  # that a first rate counts as
# Shortest first: a match is of the last kind that it is long enough for.
SHORTEST = (2, 3, 4, 6, 12)  # tokens of a match


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRates:
    """How often the next token is taken to be the copied one, by kind of match, and the module's first draft."""

    copies: tuple[float, ...]
    module: float


# Of SmolLM2-135M-Instruct, in rollouts as its module was fitted to: 132,000 matches in greedy replies, and 50,800 in
# text sampled at temperatures from 0.6 to 1.0; the module's on Spec-Bench, greedy and at 0.7.
GREEDY = FirstRates(copies=(0.57, 0.62, 0.73, 0.83, 0.95), module=0.5)
SAMPLED = FirstRates(copies=(0.45, 0.53, 0.67, 0.79, 0.92), module=0.42)


@dataclass(slots=True)
class _Rate:
    """How often something was right; `right` and `rounds` hold what is taken for granted at first."""

    right: float
    rounds: float

    @classmethod
    def beginning_at(cls, share: float) -> _Rate:
        return cls(right=share * PRIOR_ROUNDS, rounds=PRIOR_ROUNDS)

    @property
    def share(self) -> float:
        return self.right / self.rounds

    def count(self, is_right: bool) -> None:
        self.rounds += 1
        self.right += is_right


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Tokens that may come next. `survivals[j]`: how often those up to the j-th are all right, as far as is known."""

    tokens: tuple[int, ...]
    survivals: tuple[float, ...]


class PromptLookup:
    """The text of one request as far as it is known, and who has been right about it. Mutable."""

    def __init__(self, token_ids: Iterable[int] = (), *, first_rates: FirstRates = GREEDY) -> None:
        self._text = _text(token_ids)
        self._copies = tuple(_Rate.beginning_at(share) for share in first_rates.copies)
        self._module = _Rate.beginning_at(first_rates.module)
        self._guesses: list[tuple[_Rate, str]] = []  # of the token that comes next: whose, and which

    def extend(self, token_ids: Iterable[int]) -> None:
        """Tokens that follow; the first of them says who guessed right."""
        newest = _text(token_ids)
        if not newest:
            return
        for rate, token in self._guesses:
            rate.count(newest[:1] == token)
        self._guesses.clear()
        self._text += newest

    @property
    def num_tokens(self) -> int:
        """Tokens that are known."""
        return len(self._text)

    def find(self, num_tokens: int, *, module_drafts: bool = True) -> Copy | None:
        """So many tokens copied from where the text repeats itself, to be asked for once in a round.

        None where nothing is found, or where the module is likelier to be right, if it drafts at all.
        """
        place = self._find()
        if place is None:
            return None
        kind, start = place
        rate, period = self._copies[kind], len(self._text) - start
        self._guesses.append((rate, self._text[start]))
        if module_drafts and rate.share < self._module.share:
            return None
        return Copy(
            tokens=tuple(ord(self._text[start + place % period]) for place in range(num_tokens)),
            survivals=self._survivals(kind, num_tokens),
        )

    def module_drafted(self, token_id: int) -> None:
        """The module's first draft, in a round that copied nothing."""
        self._guesses.append((self._module, chr(token_id)))

    def _survivals(self, kind: int, num_tokens: int) -> tuple[float, ...]:
        """Each token that is right makes the match longer by one."""
        survivals, sure = list[float](), 1.0
        for size in range(SHORTEST[kind], SHORTEST[kind] + num_tokens):
            kind = max(index for index, shortest in enumerate(SHORTEST) if shortest <= size)
            sure *= self._copies[kind].share
            survivals.append(round(sure, 4))
        return tuple(survivals)

    def _find(self) -> tuple[int, int] | None:
        """The newest of the longest matches: its kind, and where what followed it begins."""
        text = self._text
        oldest = max(0, len(text) - LOOKBACK)
        for kind in reversed(range(len(SHORTEST))):
            size = SHORTEST[kind]
            place = text.rfind(text[-size:], oldest, len(text) - 1) if len(text) > size else -1
            if place >= 0:
                return kind, place + size
        return None


def _text(token_ids: Iterable[int]) -> str:
    """Tokens as characters, one each: a string is searched by the interpreter's own fast search."""
    return "".join(map(chr, token_ids))
