"""The fitting loss of one batch: step 1 on every counted base, further steps on the drawn chains.

Shapes: B documents, T bases, M chains, N counted rows, d hidden size, V sub-vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from seqmtp_serve.training.batches import Batch
from seqmtp_serve.training.draft_module import DraftModule
from seqmtp_serve.training.objective import Kind, divergence
from seqmtp_serve.training.target import rms_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """The target's own parts the loss uses; none of them has a gradient."""

    embed_Vd: torch.Tensor  # whole vocabulary, any float dtype
    norm_d: torch.Tensor
    head_Vd: torch.Tensor  # rows of the sub-vocabulary, in the dtype the products run in
    norm_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthLoss:
    """Sums over the counted rows of one depth; ``hits`` counts rows where both argmaxes agree."""

    total: torch.Tensor
    num_rows: int
    hits: int


def batch_losses(
    module: DraftModule, batch: Batch, frozen: Frozen, *, depth: int, sharpness: float = 1.0, kind: Kind = "kl"
) -> list[DepthLoss]:
    """One entry a depth; steps >= 2 are fed the module's own previous output and the true token."""
    docs_B1 = torch.arange(len(batch.tokens))[:, None]
    num_rows = batch.tokens.shape[1] - 2
    embed_BTd = _embed(frozen, batch.tokens[:, 1 : num_rows + 1])
    outputs_BQd, rows = module.first_step(batch.hidden[:, :num_rows], embed_BTd, batch.bases_BQ)
    labels_BQd = batch.hidden[docs_B1, batch.bases_BQ + 1]
    losses = [_depth_loss(frozen, outputs_BQd[batch.live_BQ], labels_BQd[batch.live_BQ], sharpness, kind)]
    fed_BMd, starts_BM = outputs_BQd[docs_B1, batch.chains_BM], batch.bases_BQ[docs_B1, batch.chains_BM]
    for step in range(2, depth + 1):
        live_BM = batch.chain_len_BM >= step
        bases_BM = (starts_BM + step - 1).clamp_max(num_rows - 1)
        fed_BMd = module.next_step(fed_BMd, _embed(frozen, batch.tokens[docs_B1, bases_BM + 1]), starts_BM, rows)
        labels_BMd = batch.hidden[docs_B1, bases_BM + 1]
        losses.append(_depth_loss(frozen, fed_BMd[live_BM], labels_BMd[live_BM], sharpness, kind))
    return losses


def _embed(frozen: Frozen, tokens: torch.Tensor) -> torch.Tensor:
    return frozen.embed_Vd[tokens].float()


def _depth_loss(
    frozen: Frozen, draft_Nd: torch.Tensor, target_Nd: torch.Tensor, sharpness: float, kind: Kind
) -> DepthLoss:
    def normed(x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x.float(), frozen.norm_d, frozen.norm_eps)

    loss_N, hit_N = divergence(normed(draft_Nd), normed(target_Nd), frozen.head_Vd, sharpness, kind)
    return DepthLoss(total=loss_N.sum(), num_rows=len(loss_N), hits=int(hit_N.sum()))
