"""Drafts that a request brings itself: what its grammar forces, its prediction, and copies from its own text.

What the grammar forces comes first: it is nearly sure (only the same text in other tokens can come instead) and costs
nothing to find. Where the proposer's draft begins with it, its further tokens follow. A prediction is preferred to the
proposer's draft while it was right about the newest tokens; else it is a guess, for a request that has no other draft.
A copy stands in the place of the proposer's draft, which was not asked for.

Under the ratio contract a draft may be used or not for any reason but its own tokens: they are a sample of the q that
they are judged by. So forced tokens are judged as what they are, certain, and a proposer's token only lets those behind
it follow, whose q was computed after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from seqmtp_serve.engine.sequences import TargetSequence
from seqmtp_serve.ports import Draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A round's drafts: `num_forced` that the grammar forces, then the proposer's or copied ones; or a prediction's."""

    draft: Draft | None = None
    num_forced: int = 0
    is_predicted: bool = False
    is_copied: bool = False


@dataclass(slots=True)
class OwnDrafts:
    """Those of one step, by request id."""

    forced: dict[str, Draft] = field(default_factory=dict)
    predicted: dict[str, Draft] = field(default_factory=dict)
    guessed: dict[str, Draft] = field(default_factory=dict)
    copied: dict[str, Draft] = field(default_factory=dict)

    def suffices(self, name: str, depth: int) -> bool:
        """Whether this request's round needs no draft of the proposer's, which may have `depth` tokens."""
        is_own = name in self.predicted or name in self.copied
        return is_own or (name in self.forced and len(self.forced[name].tokens) >= depth)

    def choose(self, name: str, proposed: Draft | None) -> Chosen:
        """The round's drafts; `proposed` is the proposer's."""
        forced, is_copied = self.forced.get(name), name in self.copied
        proposed = self.copied.get(name, proposed)
        predicted = self.predicted.get(name) or (self.guessed.get(name) if proposed is None else None)
        if predicted is not None and (forced is None or _goes_further(predicted, forced)):
            return Chosen(draft=predicted, is_predicted=True)
        if forced is None:
            return Chosen(draft=proposed, is_copied=is_copied)
        num_forced = len(forced.tokens)
        if proposed is None or not _goes_further(proposed, forced):
            return Chosen(draft=forced, num_forced=num_forced)
        both = replace(proposed, draft_probs=(*forced.draft_probs, *proposed.draft_probs[num_forced:]))
        return Chosen(draft=both, num_forced=num_forced, is_copied=is_copied)


def own_drafts(wanted: Mapping[str, tuple[TargetSequence, int, int]], vocab_size: int) -> OwnDrafts:
    """By request id; `wanted` says how many copied tokens each may have at most, and how many others."""
    found = OwnDrafts()
    for name, (sequence, num_copied, num_tokens) in wanted.items():
        if copied := sequence.copied(num_copied):
            found.copied[name] = copied
        if not num_tokens:
            continue
        if forced := sequence.forced()[:num_tokens]:
            found.forced[name] = sequence.certain(forced)
        if draft := sequence.predicted(num_tokens, vocab_size):
            (found.predicted if sequence.is_predicted else found.guessed)[name] = draft
    return found


def _goes_further(draft: Draft, forced: Draft) -> bool:
    num_forced = len(forced.tokens)
    return len(draft.tokens) > num_forced and draft.tokens[:num_forced] == forced.tokens
