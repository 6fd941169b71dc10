"""How likely a draft is to be accepted, by how sure the module is of it: where a chain should end.

The probability of the module's likeliest token says it well: drafts of 0.9 and more were accepted 92 times in a
hundred, those below 0.2 eleven times (SmolLM2's module, greedy), and alike at each position of a chain, once those
before it are accepted. SVIP (Zhang et al., arXiv 2411.18462) and EAGLE-2 (Li et al., arXiv 2406.16858) end drafts so.

It depends on the draft's distribution and not on the token drawn from it, so under the ratio contract a draft may be
left out for it: the token is a sample of the q that it would be judged by either way (`engine/own_drafts.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from seqmtp_serve.request import Contract, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

NUM_BINS = 10  # of confidence, equally wide
PRIOR_DRAFTS = 16.0  # that a first rate counts as
MEMORY = 512.0  # drafts of a bin; then half of what is known of it is forgotten

# Of SmolLM2-135M's module on a quarter of Spec-Bench: 16,062 greedy drafts that were or were not the text, and the
# overlap of 8,211 drafts' distributions with the target's at temperature 0.7.
GREEDY = (0.06, 0.12, 0.22, 0.29, 0.37, 0.47, 0.55, 0.61, 0.73, 0.92)
SAMPLED = (0.15, 0.22, 0.28, 0.35, 0.39, 0.46, 0.49, 0.58, 0.63, 0.86)


def confidences(logits_BV: Tensor) -> list[float]:
    """Of each row, the probability of its likeliest token at temperature 1; NaN where the row is broken."""
    shares: list[float] = logits_BV.softmax(-1).amax(-1).tolist()
    return shares


def num_worth(chances: Sequence[float], floor: float) -> int:
    """Of drafts with these chances, those before the first that is below the floor."""
    return sum(1 for _ in takewhile(lambda chance: chance >= floor, chances))


@dataclass(slots=True)
class _Rates:
    """Of the drafts of requests that are drawn about alike, by bin: how many, and how many were right."""

    right: list[float]
    drafts: list[float] = field(default_factory=lambda: [PRIOR_DRAFTS] * NUM_BINS)

    @classmethod
    def beginning_at(cls, shares: Sequence[float]) -> _Rates:
        return cls(right=[PRIOR_DRAFTS * share for share in shares])

    def count(self, place: int, is_right: bool) -> None:
        if self.drafts[place] >= MEMORY:
            self.drafts[place] /= 2
            self.right[place] /= 2
        self.drafts[place] += 1
        self.right[place] += is_right


@dataclass(slots=True)
class DraftChances:
    """Begins with what was measured and follows the drafts that it is told of. Deterministic."""

    _rates: dict[int, _Rates] = field(default_factory=dict)

    def of(self, params: SamplingParams, confidence: float) -> float:
        """The chance that a draft of this confidence is accepted, once those before it are."""
        rates, place = self._of(params), _bin(confidence)
        return rates.right[place] / rates.drafts[place]

    def learn(
        self, params: SamplingParams, tokens: Sequence[int], shares: Sequence[float], text: Sequence[int]
    ) -> None:
        """Drafts, the confidence of each, and the text that came in their place, as far as it is known.

        Where the draft does not take part in choosing the text, that says what became of it, even if it was left out.
        Under the ratio contract it does take part, so nothing is learned there.
        """
        if params.contract is Contract.RATIO:
            return
        rates = self._of(params)
        for token, share, true in zip(tokens, shares, text, strict=False):
            rates.count(_bin(share), token == true)
            if token != true:
                return

    def _of(self, params: SamplingParams) -> _Rates:
        group = round(2 * params.temperature)
        if group not in self._rates:
            self._rates[group] = _Rates.beginning_at(SAMPLED if group else GREEDY)
        return self._rates[group]


def _bin(confidence: float) -> int:
    return min(NUM_BINS - 1, max(0, int(confidence * NUM_BINS)))
