"""An MTP module as training drafts with it: step 1 over whole documents, then steps of self-fed chains.

A chain starts at base b with the step-1 row of b. Its step-k row has base b+k-1, consumes the output of its own step
k-1 and the embedding of x_{b+k}, and attends to the step-1 rows of bases <= b and to the step-2..k rows of its own
chain: what a server's rollout has in its cache.

Shapes: B documents, T bases, Q wanted bases, M chains, H heads, G key/value heads, R = H / G, D key and V value size,
d hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(slots=True, kw_only=True)
class Rows:
    """Keys and values a chain can see: step-1 rows ``[B, G, T, D]``, then a ``[B, G, M, D]`` pair a further step."""

    keys: torch.Tensor
    values: torch.Tensor
    chain: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


class DraftModule(nn.Module):
    """Its parameters are those of the module alone: nothing of the target is among them."""

    def first_step(
        self, hidden_BTd: torch.Tensor, embed_BTd: torch.Tensor, wanted_BQ: torch.Tensor
    ) -> tuple[torch.Tensor, Rows]:
        """Step-1 rows from target rows and the embeddings of the tokens after them: all keys and values, and the
        outputs ``[B, Q, d]`` of the wanted bases, before any final norm."""
        raise NotImplementedError

    def next_step(
        self, hidden_BMd: torch.Tensor, embed_BMd: torch.Tensor, starts_BM: torch.Tensor, rows: Rows
    ) -> torch.Tensor:
        """One more step of M chains started at ``starts_BM``, fed with what the step before gave; appends to
        ``rows.chain`` and returns ``[B, M, d]``."""
        raise NotImplementedError


def attend_first(q_BHQD: torch.Tensor, rows: Rows, wanted_BQ: torch.Tensor, scale: float) -> torch.Tensor:
    """Each wanted base over the step-1 rows up to its own: ``[B, H, Q, V]``."""
    seen_B1QT = (torch.arange(rows.keys.shape[2]) <= wanted_BQ[..., None])[:, None]
    return F.scaled_dot_product_attention(q_BHQD, rows.keys, rows.values, seen_B1QT, scale=scale, enable_gqa=True)


def attend_chain(q_BHMD: torch.Tensor, rows: Rows, starts_BM: torch.Tensor, scale: float) -> torch.Tensor:
    """Each chain over the step-1 rows up to its start and all of its own in ``rows.chain``: ``[B, H, M, V]``."""
    num_chains, num_groups, span = starts_BM.shape[1], rows.keys.shape[1], rows.keys.shape[2]
    q_BGRMD = torch.unflatten(q_BHMD, 1, (num_groups, -1)) * scale
    scores_BGXT = (q_BGRMD.flatten(2, 3) @ rows.keys.transpose(-1, -2)).float()  # X = R * M
    hide_BMT = torch.arange(span) > starts_BM[..., None]
    scores_BGRMT = torch.unflatten(scores_BGXT, 2, (-1, num_chains))
    scores_BGRMT = scores_BGRMT.masked_fill(hide_BMT[:, None, None], float("-inf"))
    own = [(q_BGRMD * k[:, :, None]).sum(-1, keepdim=True).float() for k, _ in rows.chain]
    weights = torch.softmax(torch.cat((scores_BGRMT, *own), -1), -1).to(rows.values.dtype)
    mixed_BGXV = weights[..., :span].flatten(2, 3) @ rows.values
    mixed_BGRMV = torch.unflatten(mixed_BGXV, 2, (-1, num_chains))
    for index, (_, v) in enumerate(rows.chain):
        mixed_BGRMV = mixed_BGRMV + weights[..., span + index, None] * v[:, :, None]
    return mixed_BGRMV.flatten(1, 2)
