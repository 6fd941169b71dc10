"""The oracle of the module: one row at a time, with a cache that grows and is cut back, as a server would run it.

Written from the equations, without the module's own attention: no masks, no batches, no diagonal terms.
"""

from __future__ import annotations

import torch

from seqmtp_serve.training.mtp_module import MtpModule

Cache = list[tuple[torch.Tensor, torch.Tensor]]  # one (key [G, D], value [G, D]) for each row, oldest first


def norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean() + eps).sqrt() * gain


def turn(x_HD: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    size = x_HD.shape[-1]
    out = torch.empty_like(x_HD)
    for i in range(size // 2):
        angle = torch.tensor(position / theta ** (2 * i / size), dtype=torch.float64)
        cos, sin = angle.cos().float(), angle.sin().float()
        low, high = x_HD[:, i], x_HD[:, i + size // 2]
        out[:, i], out[:, i + size // 2] = low * cos - high * sin, high * cos + low * sin
    return out


def plain_row(
    module: MtpModule, cache: Cache, hidden_d: torch.Tensor, embed_d: torch.Tensor, base: int
) -> torch.Tensor:
    """Run the row of one base: appends its key and value, returns its pre-norm output ``[d]``."""
    shape, w = module.shape, dict(module.named_parameters())
    eps, heads, groups, size = shape.rms_eps, shape.num_heads, shape.num_kv_heads, shape.head_dim
    pair = torch.cat((norm(embed_d, w["enorm.weight"], eps), norm(hidden_d, w["hnorm.weight"], eps)))
    residual = w["eh_proj.weight"] @ pair
    inner = norm(residual, w["input_layernorm.weight"], eps)
    q = turn((w["self_attn.q_proj.weight"] @ inner).view(heads, size), base, shape.rope_theta)
    k = turn((w["self_attn.k_proj.weight"] @ inner).view(groups, size), base, shape.rope_theta)
    cache.append((k, (w["self_attn.v_proj.weight"] @ inner).view(groups, size)))
    mixed = []
    for head in range(heads):
        group = head // (heads // groups)
        scores = torch.stack([q[head] @ key[group] for key, _ in cache]) / size**0.5
        weights = torch.softmax(scores, 0)
        mixed.append(sum(weight * value[group] for weight, (_, value) in zip(weights, cache, strict=True)))
    residual = residual + w["self_attn.o_proj.weight"] @ torch.cat(mixed)
    inner = norm(residual, w["post_attention_layernorm.weight"], eps)
    gate, up = w["mlp.gate_proj.weight"] @ inner, w["mlp.up_proj.weight"] @ inner
    return residual + w["mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)


def plain_chain(
    module: MtpModule, hidden_Td: torch.Tensor, embed_Td: torch.Tensor, start: int, depth: int
) -> list[torch.Tensor]:
    """Outputs of steps 1..depth of the chain started at ``start``; ``embed_Td[i]`` is E(x_{i+1})."""
    cache: Cache = []
    for base in range(start):
        plain_row(module, cache, hidden_Td[base], embed_Td[base], base)
    fed, outputs = hidden_Td[start], []
    for step in range(depth):
        fed = plain_row(module, cache, fed, embed_Td[start + step], start + step)
        outputs.append(fed)
    return outputs
