"""The plain reference of a DeepSeek-V3 block, for `oracle.py`: keys and values of every head, one expert at a time.

In the precision of its input.

Shapes: T tokens, d hidden, H heads, n/r/v sizes of a head's plain, rotary and value part, E values of a cached row.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from seqmtp_serve.model.deepseek_config import DeepseekConfig
from seqmtp_serve.model.mla_forms import UpProjections, attend_naive
from seqmtp_serve.model.moe import MoeWeights
from seqmtp_serve.model.moe_naive import naive_moe
from seqmtp_serve.model.yarn import inverse_frequencies, rotation_multiplier, softmax_scale


def latent_attention(
    tensors: Mapping[str, Tensor], prefix: str, config: DeepseekConfig, x_Td: Tensor, positions_T: Tensor
) -> Tensor:
    """Causal latent attention over a whole sequence, `[T, d]`, without norm and residual."""

    def weight(name: str) -> Tensor:
        return tensors[f"{prefix}self_attn.{name}.weight"].to(x_Td.dtype)

    def norm(name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_eps) * weight(name)

    if config.q_lora_rank:
        q_Tq = norm("q_a_layernorm", x_Td @ weight("q_a_proj").T) @ weight("q_b_proj").T
    else:
        q_Tq = x_Td @ weight("q_proj").T
    q_nope, q_rope = torch.split(
        q_Tq.view(len(x_Td), config.num_heads, -1), [config.nope_head_dim, config.rope_head_dim], -1
    )
    latent, k_rope = torch.split(x_Td @ weight("kv_a_proj_with_mqa").T, [config.kv_lora_rank, config.rope_head_dim], -1)
    cached_TE = torch.cat((norm("kv_a_layernorm", latent), rotate_pairs(k_rope, positions_T, config)), -1)
    q_rope = rotate_pairs(q_rope.transpose(0, 1), positions_T, config).transpose(0, 1)
    up = UpProjections.split(weight("kv_b_proj"), config.num_heads, config.nope_head_dim)
    causal_TT = torch.ones(len(x_Td), len(x_Td), dtype=torch.bool).tril()
    mixed_THv = attend_naive(q_nope, q_rope, cached_TE, up, softmax_scale(config), causal_TT)
    return mixed_THv.flatten(1) @ weight("o_proj").T


def feed_forward(tensors: Mapping[str, Tensor], prefix: str, config: DeepseekConfig, x_Td: Tensor) -> Tensor:
    """The dense SwiGLU or the experts of a layer, `[T, d]`, without norm and residual."""
    if f"{prefix}mlp.gate.weight" in tensors:
        return naive_moe(x_Td, MoeWeights.read(tensors, f"{prefix}mlp.", config.moe), config.moe)
    gate, up, down = (tensors[f"{prefix}mlp.{name}_proj.weight"].to(x_Td.dtype) for name in ("gate", "up", "down"))
    return (F.silu(x_Td @ gate.T) * (x_Td @ up.T)) @ down.T


def rotate_pairs(x_xTr: Tensor, positions_T: Tensor, config: DeepseekConfig) -> Tensor:
    """RoPE as released: dimension 2j pairs with 2j + 1. The last two axes are positions and the rotary part."""
    angle_TC = positions_T[:, None] * inverse_frequencies(config.rope_head_dim, config.rope_theta, config.yarn)
    multiplier = rotation_multiplier(config.yarn)
    cos, sin = ((multiplier * each).to(x_xTr.dtype) for each in (angle_TC.cos(), angle_TC.sin()))
    even, odd = x_xTr[..., 0::2], x_xTr[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
