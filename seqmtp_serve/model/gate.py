"""The `noaux_tc` gate of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): which experts a token goes to, and how much.

In float32 throughout. The correction bias takes part in the selection and in nothing else: the weights are the plain
sigmoid scores. Of `num_groups` groups of consecutive experts, those `top_k_groups` with the largest sum of their two
best biased scores stay in the race. Equal scores go to the lower id.

Shapes: T tokens, d hidden, E experts, G groups, k experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from seqmtp_serve.errors import TargetIncomplete
from seqmtp_serve.model.deepseek_config import MoeConfig
from seqmtp_serve.model.linear import make_linear
from seqmtp_serve.model.numerics import Numerics

_NO_ZERO_DIVISION = 1e-20  # as released: all k scores may underflow to zero
_VECTORS = 64  # values that an elementwise loop takes at once, on the widest CPU
_BEST_OF_GROUP = 2  # experts whose biased scores rank a group


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Where each token goes: k distinct experts in ascending id, the order in which their outputs are summed."""

    experts_Tk: Tensor  # int64
    weights_Tk: Tensor  # float32


class Gate:
    """`[T, d]` to a `Routing`. Raises TargetIncomplete for groups that cannot give every token its k experts."""

    def __init__(self, weight_Ed: Tensor, bias_E: Tensor, config: MoeConfig, numerics: Numerics) -> None:
        _check(config, weight_Ed, bias_E)
        self._config = config
        self._logits = make_linear((weight_Ed,), replace(numerics, int8_levels=0, product_dtype=torch.float32))
        self._bias_E = bias_E.float()

    def __call__(self, x_Td: Tensor) -> Routing:
        scores_TE = _sigmoid(self._logits(x_Td.float()))
        experts_Tk = self._select(scores_TE + self._bias_E).sort(dim=-1).values
        weights_Tk = scores_TE.gather(-1, experts_Tk)
        if self._config.normalise_weights:
            weights_Tk = weights_Tk / (_sum_in_order(weights_Tk) + _NO_ZERO_DIVISION)
        return Routing(experts_Tk=experts_Tk, weights_Tk=weights_Tk * self._config.routed_scaling)

    def _select(self, biased_TE: Tensor) -> Tensor:
        """The k experts `[T, k]` with the largest biased scores within the best groups."""
        config = self._config
        if config.top_k_groups < config.num_groups:
            biased_TGe = torch.unflatten(biased_TE, -1, (config.num_groups, -1))
            group_TG = _sum_in_order(biased_TGe.sort(dim=-1, descending=True).values[..., :_BEST_OF_GROUP]).squeeze(-1)
            out_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter_(
                -1, _best(group_TG, config.top_k_groups), False
            )
            # Not zero: a biased score may be negative, and then a masked expert would win.
            biased_TE = biased_TGe.masked_fill(out_TG.unsqueeze(-1), float("-inf")).flatten(-2)
        return _best(biased_TE, config.top_k)


def _sigmoid(x_TE: Tensor) -> Tensor:
    """Over whole vectors: what lies beyond the last one goes through another exp, and how much that is depends on T."""
    count = x_TE.numel()
    padded = F.pad(x_TE.flatten(), (0, -count % _VECTORS))
    return torch.sigmoid(padded)[:count].view_as(x_TE)


def _best(scores_TE: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest. Stable: `torch.topk` does not say which of two equal scores it takes."""
    return scores_TE.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _sum_in_order(values_Tk: Tensor) -> Tensor:
    """`[..., k]` to `[..., 1]`, from left to right: a library's reduction may add in another order for another T."""
    total_T1 = values_Tk[..., :1]
    for column in range(1, values_Tk.shape[-1]):
        total_T1 = total_T1 + values_Tk[..., column : column + 1]
    return total_T1


def _check(config: MoeConfig, weight_Ed: Tensor, bias_E: Tensor) -> None:
    experts, groups = config.num_experts, config.num_groups
    if weight_Ed.shape[0] != experts or bias_E.shape != (experts,):
        shapes = f"{tuple(weight_Ed.shape)} and {tuple(bias_E.shape)}"
        raise TargetIncomplete(f"a gate of {experts} experts has a weight [E, d] and a bias [E], not {shapes}")
    if groups < 1 or experts % groups:
        raise TargetIncomplete(f"n_group must divide the experts: {experts} are not {groups} equal groups")
    if not 1 <= config.top_k_groups <= groups:
        raise TargetIncomplete(f"topk_group must be 1 to n_group ({groups}), not {config.top_k_groups}")
    size = experts // groups
    if config.top_k_groups < groups and size < _BEST_OF_GROUP:
        raise TargetIncomplete(f"a group is ranked by its two best experts; {groups} groups leave it {size}")
    if not 1 <= config.top_k <= config.top_k_groups * size:
        raise TargetIncomplete(f"{config.top_k_groups} groups of {size} experts cannot give a token {config.top_k}")
