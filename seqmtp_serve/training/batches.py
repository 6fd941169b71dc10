"""Documents into padded batches of rows with their labels, in an order fixed by the seed.

Base i takes (h_i, x_{i+1}); the label of step k at base j = b+k-1 is x_{j+2}, and the target's own distribution there
is the one it computes from h_{j+1}. In terms of a base i and depth k: input x_{i+k}, label x_{i+k+1}.
Only labels inside the reply count: the first is the token after the bootstrap token (``prompt_len + 1``).
Shapes: B documents, T bases, Q counted bases, M chains a document, d hidden size.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from seqmtp_serve.training.shards import Document

_WINDOW = 512  # documents sorted by length together


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Padded rows: ``hidden`` [B, T+1, d] bf16 and ``tokens`` [B, T+2] cover every label of bases 0..T-1."""

    hidden: torch.Tensor
    tokens: torch.Tensor
    bases_BQ: torch.Tensor  # bases whose step-1 row has a counted label, rising; padded with the last one
    live_BQ: torch.Tensor  # bool: not padding
    chains_BM: torch.Tensor  # starts of self-fed chains, as indices into Q
    chain_len_BM: torch.Tensor  # how many steps of the chain have a counted label (0 for padding)


def make_batch(documents: Sequence[Document], *, num_chains: int, depth: int, rng: random.Random) -> Batch:
    """Pad to the longest document; ``num_chains`` starts a document are drawn from its counted bases."""
    rows = max(len(doc.tokens) for doc in documents) - 2  # bases 0..n-3 have a label with a stored distribution
    counted = max(len(doc.tokens) - 2 - first_counted_base(doc) for doc in documents)
    size = documents[0].hidden.shape[1]
    tokens = torch.zeros(len(documents), rows + 2, dtype=torch.long)
    hidden = torch.zeros(len(documents), rows + 1, size, dtype=torch.bfloat16)
    bases = torch.zeros(len(documents), counted, dtype=torch.long)
    live = torch.zeros(len(documents), counted, dtype=torch.bool)
    chains = torch.zeros(len(documents), num_chains, dtype=torch.long)
    chain_len = torch.zeros(len(documents), num_chains, dtype=torch.long)
    for index, doc in enumerate(documents):
        num_tokens, first = len(doc.tokens), first_counted_base(doc)
        own = num_tokens - 2 - first
        tokens[index, :num_tokens] = doc.tokens
        hidden[index, : num_tokens - 1] = doc.hidden[: num_tokens - 1]
        bases[index] = torch.arange(first, first + counted).clamp_max(first + own - 1)
        live[index, :own] = True
        starts = sorted(rng.sample(range(own), min(num_chains, own)))
        chains[index, : len(starts)] = torch.tensor(starts, dtype=torch.long)
        chain_len[index, : len(starts)] = torch.tensor([min(depth, own - s) for s in starts], dtype=torch.long)
    return Batch(hidden=hidden, tokens=tokens, bases_BQ=bases, live_BQ=live, chains_BM=chains, chain_len_BM=chain_len)


def first_counted_base(doc: Document) -> int:
    """The base whose label is the second reply token: the first token a draft can propose."""
    return doc.prompt_len - 1


def epoch_batches(
    documents: Sequence[Document], *, batch_rows: int, num_chains: int, depth: int, seed: int, epoch: int
) -> Iterator[Batch]:
    """One pass in an order that depends on ``(seed, epoch)`` alone; a batch holds about ``batch_rows`` padded rows."""
    rng = random.Random(f"{seed}/{epoch}")
    order = [index for index, doc in enumerate(documents) if len(doc.tokens) - doc.prompt_len >= 4]
    rng.shuffle(order)
    groups: list[list[int]] = []
    for at in range(0, len(order), _WINDOW):
        group: list[int] = []
        for index in sorted(order[at : at + _WINDOW], key=lambda i: len(documents[i].tokens)):
            if group and (len(group) + 1) * len(documents[index].tokens) > batch_rows:
                groups.append(group)
                group = []
            group.append(index)
        groups.append(group)
    rng.shuffle(groups)
    for group in groups:
        yield make_batch([documents[i] for i in group], num_chains=num_chains, depth=depth, rng=rng)
