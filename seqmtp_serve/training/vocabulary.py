"""The sub-vocabulary of drafts: the most frequent reply tokens, most frequent first (FR-Spec, arXiv 2502.14856)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from seqmtp_serve.training.shards import Document


def count_reply_tokens(documents: Iterable[Document], vocab_size: int) -> torch.Tensor:
    """How often each id occurs in the replies, int64 ``[vocab]``."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for doc in documents:
        counts += torch.bincount(doc.tokens[doc.prompt_len :], minlength=vocab_size)
    return counts


def rank_tokens(counts_V: torch.Tensor, size: int) -> torch.Tensor:
    """int32 ``[size]``: ids by falling count; equal counts (and unseen ids) by rising id."""
    order = torch.sort(counts_V, descending=True, stable=True).indices
    return order[:size].int()


def coverage(counts_V: torch.Tensor, draft_token_ids: torch.Tensor) -> float:
    """Share of counted occurrences that the sub-vocabulary can propose."""
    return float(counts_V[draft_token_ids.long()].sum() / counts_V.sum())
