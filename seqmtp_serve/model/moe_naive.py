"""A mixture-of-experts layer as its equations: one token at a time, every expert in turn. The oracle of `moe.py`.

In the precision of its input: give it float64. No tiles, no groups of rows, no dispatch; slow, and meant to be read.

Shapes: T tokens, d hidden, E experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from seqmtp_serve.model.deepseek_config import MoeConfig
from seqmtp_serve.model.experts import SwiGluWeights
from seqmtp_serve.model.moe import MoeWeights


def naive_moe(x_Td: Tensor, weights: MoeWeights, config: MoeConfig) -> Tensor:
    """`[T, d]` to `[T, d]`. `weights` must hold every expert."""
    return torch.stack([_token(x_d, weights, config) for x_d in x_Td])


def naive_route(x_d: Tensor, weights: MoeWeights, config: MoeConfig) -> dict[int, float]:
    """The weight of each expert that one token goes to."""
    scores = torch.sigmoid(weights.gate_Ed.to(x_d.dtype) @ x_d).tolist()
    biased = [score + bias for score, bias in zip(scores, weights.bias_E.tolist(), strict=True)]
    size = config.num_experts // config.num_groups
    groups = [range(group * size, (group + 1) * size) for group in range(config.num_groups)]
    ranks = [sum(sorted((biased[expert] for expert in group), reverse=True)[:2]) for group in groups]
    best_groups = sorted(range(config.num_groups), key=lambda group: (-ranks[group], group))[: config.top_k_groups]
    allowed = [expert for group in sorted(best_groups) for expert in groups[group]]
    chosen = sorted(sorted(allowed, key=lambda expert: (-biased[expert], expert))[: config.top_k])
    total = sum(scores[expert] for expert in chosen) + 1e-20 if config.normalise_weights else 1.0
    return {expert: scores[expert] / total * config.routed_scaling for expert in chosen}


def _token(x_d: Tensor, weights: MoeWeights, config: MoeConfig) -> Tensor:
    out_d = torch.zeros_like(x_d)
    for expert, share in naive_route(x_d, weights, config).items():
        out_d = out_d + share * _swiglu(x_d, weights.experts[expert])
    return out_d if weights.shared is None else out_d + _swiglu(x_d, weights.shared)


def _swiglu(x_d: Tensor, weights: SwiGluWeights) -> Tensor:
    gate_Fd, up_Fd, down_dF = (each.to(x_d.dtype) for each in (weights.gate_Fd, weights.up_Fd, weights.down_dF))
    return down_dF @ (F.silu(gate_Fd @ x_d) * (up_Fd @ x_d))
