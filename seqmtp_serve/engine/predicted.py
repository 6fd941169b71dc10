"""Drafts of a step from requests' own predictions, beside those of the proposer."""

from __future__ import annotations

from collections.abc import Mapping

from seqmtp_serve.engine.sequences import TargetSequence
from seqmtp_serve.ports import Draft


def predicted_drafts(
    wanted: Mapping[str, tuple[TargetSequence, int]], vocab_size: int
) -> tuple[dict[str, Draft], dict[str, Draft]]:
    """By request id, at most as many tokens as `wanted` says: drafts to prefer to the proposer's, and mere guesses.

    A prediction is preferred while it was right about the newest tokens; a guess is for who has no other draft.
    """
    sure: dict[str, Draft] = {}
    guesses: dict[str, Draft] = {}
    for name, (sequence, num_tokens) in wanted.items():
        draft = sequence.predicted(num_tokens, vocab_size) if num_tokens else None
        if draft is not None:
            (sure if sequence.is_predicted else guesses)[name] = draft
    return sure, guesses
