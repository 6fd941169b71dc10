"""The same model in a basis where no channel is huge, so that eight bits hold an activation row (QuaRot, Ashkboos et
al., arXiv 2404.00456, without its online transforms).

RMSNorm without a gain commutes with an orthogonal Q, so the residual stream may be kept as h Q: gains and Q go into the
weights that read it, and Q into those that write it. Likewise each value head and the output projection that reads it.
A random Q spreads the few huge channels of a trained model over all, and they no longer set the scale of the rest.

Shapes: d hidden, D head size, V vocabulary, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from seqmtp_serve.model.config import LlamaConfig

_SEED = 576  # any seed will do; a fixed one makes replicas equal


def random_rotation(size: int) -> Tensor:
    """An orthogonal matrix `[size, size]`, uniformly distributed, the same on every call."""
    gaussian = torch.randn(size, size, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    return torch.mul(q, r.diagonal().sign()).float()


def rotated_block(weight: Callable[[str], Tensor], config: LlamaConfig, rotation_dd: Tensor) -> dict[str, Tensor]:
    """The block's weights, by the same names, for a residual stream of h Q; its norms have gain one."""
    reads = {
        "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    }
    rotated = {}
    for norm, names in reads.items():
        rotated[norm] = torch.ones(config.hidden_size)
        for name in names:
            rotated[name] = (weight(name) * weight(norm)) @ rotation_dd
    head_DD, dim = random_rotation(config.head_dim), config.head_dim
    values = rotated["self_attn.v_proj"].view(-1, dim, config.hidden_size)
    rotated["self_attn.v_proj"] = (head_DD.T @ values).flatten(0, 1)
    mixed = weight("self_attn.o_proj").view(config.hidden_size, -1, dim) @ head_DD
    rotated["self_attn.o_proj"] = rotation_dd.T @ mixed.flatten(1)
    rotated["mlp.down_proj"] = rotation_dd.T @ weight("mlp.down_proj")
    return rotated


def rotated_head(head_Vd: Tensor, norm_d: Tensor, rotation_dd: Tensor) -> Tensor:
    """The head `[V, d]` that reads normalised rows of h Q, with the final norm's gain inside."""
    return (head_Vd.float() * norm_d.float()) @ rotation_dd
