"""How far a draft is from the target's own distribution over a sub-vocabulary, without keeping any logits.

Both distributions are renormalised over the sub-vocabulary. ``kl`` is KL(target || draft); ``tv`` is their total
variation, one minus the chance that a draft is accepted (arXiv 2211.17192). Gradients with respect to the draft's
normed row are computed in the forward pass chunk by chunk, because the head is frozen. :func:`plain_divergence` is the
oracle.
Shapes: N rows, d hidden size, V sub-vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F

Kind = Literal["kl", "tv"]
_CHUNK = 1024  # rows at a time: the logits of a chunk stay near the cache


def plain_divergence(
    draft_Nd: torch.Tensor, target_Nd: torch.Tensor, head_Vd: torch.Tensor, kind: Kind = "kl"
) -> torch.Tensor:
    """Of each row ``[N]`` in fp32, by autograd; rows are final-normed."""
    target = F.log_softmax(target_Nd @ head_Vd.T, -1)
    draft = F.log_softmax(draft_Nd @ head_Vd.T, -1)
    if kind == "tv":
        return 0.5 * (target.exp() - draft.exp()).abs().sum(-1)
    return (target.exp() * (target - draft)).sum(-1)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, draft_Nd: torch.Tensor, target_Nd: torch.Tensor, head_Vd: torch.Tensor, sharpness: float, kind: Kind
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss_N = torch.empty(len(draft_Nd))
        hit_N = torch.empty(len(draft_Nd), dtype=torch.bool)
        grad_Nd = torch.empty(draft_Nd.shape)
        for at in range(0, len(draft_Nd), _CHUNK):
            rows = slice(at, at + _CHUNK)
            target = (target_Nd[rows].to(head_Vd.dtype) @ head_Vd.T).float().mul_(sharpness)
            draft = (draft_Nd[rows].to(head_Vd.dtype) @ head_Vd.T).float()
            hit_N[rows] = target.argmax(-1) == draft.argmax(-1)
            target, draft = F.log_softmax(target, -1), F.log_softmax(draft, -1)
            prob = target.exp()
            if kind == "kl":
                loss_N[rows] = (prob * target.sub_(draft)).sum(-1)
                slope = draft.exp_().sub_(prob)
            else:
                draft_prob = draft.exp_()
                loss_N[rows] = 0.5 * (draft_prob - prob).abs().sum(-1)
                sign = 0.5 * (draft_prob - prob).sign()
                slope = draft_prob * (sign - (draft_prob * sign).sum(-1, keepdim=True))
            grad_Nd[rows] = (slope.to(head_Vd.dtype) @ head_Vd).float()
        ctx.save_for_backward(grad_Nd)
        ctx.mark_non_differentiable(hit_N)
        return loss_N, hit_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (grad_Nd,) = ctx.saved_tensors
        return grad_Nd * grads[0][:, None], None, None, None, None


def divergence(
    draft_Nd: torch.Tensor,
    target_Nd: torch.Tensor,
    head_Vd: torch.Tensor,
    sharpness: float = 1.0,
    kind: Kind = "kl",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divergence of each row and whether both argmaxes agree, ``[N]`` each; products run in ``head_Vd``'s dtype.

    ``sharpness`` multiplies the target's logits (1 is its own distribution; more leans towards its argmax).
    """
    loss_N, hit_N = _Divergence.apply(draft_Nd, target_Nd, head_Vd, sharpness, kind)  # type: ignore[no-untyped-call]
    return loss_N, hit_N
