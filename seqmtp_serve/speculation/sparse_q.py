"""The draft's own distribution q as it travels: a few (token, probability) pairs per draft token, normalised.

Exactness asks only that y was drawn from exactly these numbers, so q may be cut to its top n, and renormalised, before
y is drawn (design: exactness). What a proposer sends is checked here, once, before it can be verified.

Shapes: B requests, K drafts, n pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from seqmtp_serve.errors import ProtocolError
from seqmtp_serve.ports import Draft
from seqmtp_serve.request import Contract
from seqmtp_serve.speculation.select_one import is_distribution

Pairs = tuple[tuple[int, float], ...]
"""One draft token's distribution: (token, probability), each token once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseQ:
    """Draft distributions of a batch; unused places hold token 0 with probability 0."""

    tokens_BKn: Tensor  # int64
    probs_BKn: Tensor  # float64

    @classmethod
    def stack(cls, chains: Sequence[Sequence[Pairs]], depth: int, device: torch.device | str = "cpu") -> SparseQ:
        """One chain of at most `depth` distributions a request; an empty chain for a request without any."""
        width = max((len(pairs) for chain in chains for pairs in chain), default=0) or 1
        padding = ((0, 0.0),)
        rows = [
            [(*pairs, *padding * (width - len(pairs))) for pairs in chain] + [padding * width] * (depth - len(chain))
            for chain in chains
        ]
        tokens = [[[token for token, _ in pairs] for pairs in row] for row in rows]
        probs = [[[prob for _, prob in pairs] for pairs in row] for row in rows]
        shape = (len(chains), depth, width)
        return cls(
            tokens_BKn=torch.tensor(tokens, dtype=torch.int64, device=device).reshape(shape),
            probs_BKn=torch.tensor(probs, dtype=torch.float64, device=device).reshape(shape),
        )


def check_draft(draft: Draft, contract: Contract, vocab_size: int) -> None:
    """Raise ProtocolError unless this draft may be verified under `contract`. Call it before the target pass.

    Token ids lie in the vocabulary; under `ratio` each token comes with a normalised distribution that contains it.
    Where chances are told, each token has one, and none is above that of the token before.
    """
    for token in draft.tokens:
        _check_token(token, vocab_size)
    if draft.chances and not _are_chances(draft):
        raise ProtocolError(f"{len(draft.tokens)} draft tokens came with chances {draft.chances}")
    if contract is not Contract.RATIO:
        return
    if len(draft.draft_probs) != len(draft.tokens):
        raise ProtocolError(f"{len(draft.tokens)} draft tokens came with {len(draft.draft_probs)} distributions")
    for token, pairs in zip(draft.tokens, draft.draft_probs, strict=True):
        probs = dict(pairs)
        for each in probs:
            _check_token(each, vocab_size)
        if len(probs) != len(pairs) or not is_distribution([prob for _, prob in pairs]):
            raise ProtocolError("a draft distribution repeats a token or is not normalised")
        if probs.get(token, 0.0) <= 0.0:
            raise ProtocolError(f"draft token {token} has probability 0 in the distribution it is said to come from")


def _are_chances(draft: Draft) -> bool:
    falling = all(1.0 >= before >= after >= 0.0 for before, after in pairwise((1.0, *draft.chances)))
    return falling and len(draft.chances) == len(draft.tokens)


def _check_token(token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise ProtocolError(f"draft token {token} is outside the vocabulary of {vocab_size}")
