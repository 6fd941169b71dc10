"""Multi-head latent attention, naive form, over packed rows (DeepSeek-V3 report, arXiv 2412.19437, section 2.1.1).

Rotary pairs are interleaved, (x0, x1), (x2, x3), …, and stay so. The rotary key is one for all heads and not normed.

Shapes: N rows, d hidden, H heads, C rotated pairs, D query and key size, V value size, G spans of equal length L.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqmtp_serve.model.deepseek_config import DeepseekConfig
from seqmtp_serve.model.yarn import softmax_scale
from seqmtp_serve.training.v3.products import Arithmetic, RmsNorm, RowLinear

Spans = Sequence[tuple[int, int]]


class LatentAttention(nn.Module):
    """The projections carry the released names; `q_lora_rank` 0 means one full query projection."""

    def __init__(self, config: DeepseekConfig, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.config, self._invariant = config, arithmetic.invariant
        self.scale = softmax_scale(config)
        d, heads = config.hidden_size, config.num_heads
        query = heads * config.query_head_dim
        if config.q_lora_rank:
            self.q_a_proj = RowLinear(d, config.q_lora_rank, arithmetic)
            self.q_a_layernorm = RmsNorm(config.q_lora_rank, config.rms_eps)
            self.q_b_proj = RowLinear(config.q_lora_rank, query, arithmetic)
        else:
            self.q_proj = RowLinear(d, query, arithmetic)
        self.kv_a_proj_with_mqa = RowLinear(d, config.latent_size, arithmetic)
        self.kv_a_layernorm = RmsNorm(config.kv_lora_rank, config.rms_eps)
        self.kv_b_proj = RowLinear(config.kv_lora_rank, heads * (config.nope_head_dim + config.v_head_dim), arithmetic)
        self.o_proj = RowLinear(heads * config.v_head_dim, d, arithmetic)

    def forward(self, x_Nd: Tensor, rotation_NC: Tensor, spans: Spans) -> Tensor:
        q_NHD, (k_NHD, v_NHV) = self.queries(x_Nd, rotation_NC), self.keys_values(x_Nd, rotation_NC)
        mixed_NHV = attend_within(q_NHD, k_NHD, v_NHV, spans, self.scale, together=not self._invariant)
        out_Nd: Tensor = self.o_proj(mixed_NHV.flatten(1))
        return out_Nd

    def queries(self, x_Nd: Tensor, rotation_NC: Tensor) -> Tensor:
        """`[N, H, D]`, the rotary part last."""
        config = self.config
        if config.q_lora_rank:
            flat: Tensor = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_Nd)))
        else:
            flat = self.q_proj(x_Nd)
        q_NHD = flat.view(-1, config.num_heads, config.query_head_dim)
        q_nope, q_rope = torch.split(q_NHD, [config.nope_head_dim, config.rope_head_dim], -1)
        return torch.cat((q_nope, rotated(q_rope, rotation_NC)), -1)

    def keys_values(self, x_Nd: Tensor, rotation_NC: Tensor) -> tuple[Tensor, Tensor]:
        """`[N, H, D]` and `[N, H, V]`: every head's own, out of the latent."""
        config, heads = self.config, self.config.num_heads
        latent, k_rope = torch.split(self.kv_a_proj_with_mqa(x_Nd), [config.kv_lora_rank, config.rope_head_dim], -1)
        kv_NHE = self.kv_b_proj(self.kv_a_layernorm(latent)).view(-1, heads, config.nope_head_dim + config.v_head_dim)
        k_nope, v_NHV = torch.split(kv_NHE, [config.nope_head_dim, config.v_head_dim], -1)
        k_rope = rotated(k_rope[:, None], rotation_NC).expand(-1, heads, -1)
        return torch.cat((k_nope, k_rope), -1), v_NHV


def rotated(x_NHR: Tensor, rotation_NC: Tensor) -> Tensor:
    """Turn neighbouring pairs by the rows of a table of `exp(i * angle)`."""
    pairs = torch.view_as_complex(torch.unflatten(x_NHR, -1, (-1, 2)))
    return torch.view_as_real(pairs * rotation_NC[:, None]).flatten(-2)


def attend_within(q_NHD: Tensor, k_NHD: Tensor, v_NHV: Tensor, spans: Spans, scale: float, *, together: bool) -> Tensor:
    """Causal attention inside each span, nothing across: `[N, H, V]`. The spans cover the rows in order.

    `together` makes one product of all spans of one length; otherwise each span is computed as if it were alone.
    """
    if not spans:  # no rows: still a part of the graph
        return v_NHV
    groups: dict[int, list[int]] = defaultdict(list)
    for start, stop in spans:
        groups[stop - start if together else start].append(start)
    length_at = {start: stop - start for start, stop in spans}
    mixed: dict[int, Tensor] = {}
    for starts in groups.values():
        length = length_at[starts[0]]
        q, k, v = (
            torch.stack([x.narrow(0, start, length) for start in starts]).transpose(1, 2) for x in (q_NHD, k_NHD, v_NHV)
        )
        out_GLHV = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)
        mixed |= dict(zip(starts, out_GLHV, strict=True))
    return torch.cat([mixed[start] for start, _ in spans])


def attend_masked(q_NHD: Tensor, k_NHD: Tensor, v_NHV: Tensor, visible_NN: Tensor, scale: float) -> Tensor:
    """The plain form of `attend_within`: every score, those of hidden rows put to -inf."""
    scores_HNN = torch.einsum("nhd,mhd->hnm", q_NHD, k_NHD) * scale
    weights_HNN = scores_HNN.masked_fill(~visible_NN, float("-inf")).softmax(-1)
    return torch.einsum("hnm,mhv->nhv", weights_HNN, v_NHV)
