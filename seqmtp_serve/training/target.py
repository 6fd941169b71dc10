"""The frozen target as a batched decoder: static KV slots, one step for all, hidden rows kept for training.

Shapes: B batch slots, T new rows of one slot, S cached positions, H heads, G KV heads, R = H / G, D head size,
d hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from seqmtp_serve.model.config import LlamaConfig
from seqmtp_serve.model.linear import FineInt8Linear, Fp32Linear, Int8Linear, Linear
from seqmtp_serve.model.probe import int8_levels
from seqmtp_serve.model.rotate import random_rotation, rotated_block, rotated_head


def rms_norm(x: torch.Tensor, gain_d: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm with a plain gain ``w`` (not ``1 + w``), in the dtype of ``x``."""
    return F.rms_norm(x, (x.shape[-1],), gain_d, eps)


def rope_tables(positions_T: torch.Tensor, shape: LlamaConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each ``[T, D]``, for the ``rotate_half`` form."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angle_Th = positions_T.float()[:, None] * (1.0 / shape.rope_theta**half)[None]
    angle_TD = torch.cat((angle_Th, angle_Th), -1)
    return angle_TD.cos(), angle_TD.sin()


def rotate(x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions to ``[T, heads, D]``."""
    low, high = x_THD.chunk(2, -1)
    return x_THD * cos_TD[:, None] + torch.cat((-high, low), -1) * sin_TD[:, None]


Numerics = Literal["int8", "rotated", "fp32"]
_BLOCK = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    norm_in_d: torch.Tensor
    qkv: Linear
    o: Linear
    norm_post_d: torch.Tensor
    gate_up: Linear
    down: Linear


class SlotCache:
    """Keys and values of ``num_slots`` sequences, each at most ``max_len`` long."""

    def __init__(self, shape: LlamaConfig, num_slots: int, max_len: int, dtype: torch.dtype) -> None:
        size = (shape.num_layers, num_slots, shape.num_kv_heads, max_len, shape.head_dim)
        self.keys = torch.zeros(size, dtype=dtype)
        self.values = torch.zeros(size, dtype=dtype)
        self.num_slots, self.max_len, self.dtype = num_slots, max_len, dtype


class FrozenTarget:
    """A llama decoder that never trains.

    ``numerics``: ``int8`` (a scale per row), ``rotated`` (the same in a basis without huge channels, as the engine
    serves it), or ``fp32``. Hidden rows go in and out in the checkpoint's own basis.
    """

    def __init__(self, shape: LlamaConfig, tensors: Mapping[str, torch.Tensor], *, numerics: Numerics = "int8") -> None:
        self.shape = shape
        embed_Vd = tensors["model.embed_tokens.weight"]
        head_Vd = tensors.get("lm_head.weight", embed_Vd)
        self._basis_dd = random_rotation(shape.hidden_size) if numerics == "rotated" else None
        self._norm_d = tensors["model.norm.weight"]
        if self._basis_dd is not None:
            head_Vd, self._norm_d = rotated_head(head_Vd, self._norm_d, self._basis_dd), torch.ones(shape.hidden_size)
            embed_Vd = embed_Vd @ self._basis_dd
        self._embed_Vd, self._head = embed_Vd, _make(head_Vd, numerics)
        self._layers = [self._layer(tensors, f"model.layers.{i}.", numerics) for i in range(shape.num_layers)]

    def _layer(self, tensors: Mapping[str, torch.Tensor], prefix: str, numerics: Numerics) -> _Layer:
        def weight(name: str) -> torch.Tensor:
            return tensors[f"{prefix}{name}.weight"]

        block = {name: weight(name) for name in _BLOCK}
        if self._basis_dd is not None:
            block = rotated_block(weight, self.shape, self._basis_dd)

        def joined(*names: str) -> torch.Tensor:
            return torch.cat([block[name] for name in names])

        return _Layer(
            norm_in_d=block["input_layernorm"],
            qkv=_make(joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), numerics),
            o=_make(block["self_attn.o_proj"], numerics),
            norm_post_d=block["post_attention_layernorm"],
            gate_up=_make(joined("mlp.gate_proj", "mlp.up_proj"), numerics),
            down=_make(block["mlp.down_proj"], numerics, fine=numerics == "rotated"),
        )

    def logits(self, hidden_Nd: torch.Tensor) -> torch.Tensor:
        """Final norm, then the tied head: ``[N, V]`` from pre-norm rows."""
        hidden_Nd = hidden_Nd.float() if self._basis_dd is None else hidden_Nd.float() @ self._basis_dd
        return self._head(rms_norm(hidden_Nd, self._norm_d, self.shape.rms_eps))

    def extend(self, tokens_T: torch.Tensor, cache: SlotCache, slot: int, start: int) -> torch.Tensor:
        """Run new rows ``start .. start+T-1`` of one slot; writes the cache, returns pre-norm hidden ``[T, d]``."""
        shape, rows = self.shape, len(tokens_T)
        cos_TD, sin_TD = rope_tables(torch.arange(start, start + rows), shape)
        mask_TS = torch.ones(rows, start + rows, dtype=torch.bool).tril(start)
        hidden_Td = self._embed_Vd[tokens_T]
        for index, layer in enumerate(self._layers):
            q_THD, k_TGD, v_TGD = self._project(layer, hidden_Td, cos_TD, sin_TD)
            keys_GSD, values_GSD = cache.keys[index, slot], cache.values[index, slot]
            keys_GSD[:, start : start + rows] = k_TGD.transpose(0, 1)
            values_GSD[:, start : start + rows] = v_TGD.transpose(0, 1)
            mixed_HTD = F.scaled_dot_product_attention(
                q_THD.transpose(0, 1)[None],
                keys_GSD[None, :, : start + rows].float(),
                values_GSD[None, :, : start + rows].float(),
                mask_TS,
                enable_gqa=True,
            )[0]
            hidden_Td = self._finish_layer(layer, hidden_Td, mixed_HTD.transpose(0, 1).reshape(rows, -1))
        return self._own_basis(hidden_Td)

    def step(self, tokens_B: torch.Tensor, positions_B: torch.Tensor, cache: SlotCache) -> torch.Tensor:
        """One new row for every slot of the cache; returns pre-norm hidden ``[B, d]``.

        Scores run over the whole slot length: slicing it would make each product copy the cache first.
        """
        shape, batch = self.shape, len(tokens_B)
        slots_B = torch.arange(batch)
        cos_BD, sin_BD = rope_tables(positions_B, shape)
        hide_BS = torch.arange(cache.max_len)[None] > positions_B[:, None]
        bias_B11S = torch.zeros(hide_BS.shape).masked_fill_(hide_BS, float("-inf"))[:, None, None]
        hidden_Bd = self._embed_Vd[tokens_B]
        for index, layer in enumerate(self._layers):
            q_BHD, k_BGD, v_BGD = self._project(layer, hidden_Bd, cos_BD, sin_BD)
            keys_BGSD, values_BGSD = cache.keys[index], cache.values[index]
            keys_BGSD[slots_B, :, positions_B] = k_BGD.to(cache.dtype)
            values_BGSD[slots_B, :, positions_B] = v_BGD.to(cache.dtype)
            q_BGRD = torch.unflatten((q_BHD * shape.head_dim**-0.5).to(cache.dtype), 1, (shape.num_kv_heads, -1))
            scores_BGRS = (q_BGRD @ keys_BGSD.transpose(-1, -2)).float().add_(bias_B11S)
            weights_BGRS = torch.softmax(scores_BGRS, -1).to(cache.dtype)
            mixed_BGRD = (weights_BGRS @ values_BGSD).float()
            hidden_Bd = self._finish_layer(layer, hidden_Bd, mixed_BGRD.reshape(batch, -1))
        return self._own_basis(hidden_Bd)

    def _project(
        self, layer: _Layer, hidden_Nd: torch.Tensor, cos_ND: torch.Tensor, sin_ND: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shape = self.shape
        sizes = [shape.num_heads * shape.head_dim] + 2 * [shape.num_kv_heads * shape.head_dim]
        fused = layer.qkv(rms_norm(hidden_Nd, layer.norm_in_d, shape.rms_eps))
        q, k, v = (torch.unflatten(part, -1, (-1, shape.head_dim)) for part in torch.split(fused, sizes, -1))
        return rotate(q, cos_ND, sin_ND), rotate(k, cos_ND, sin_ND), v

    def _finish_layer(self, layer: _Layer, hidden_Nd: torch.Tensor, mixed_NO: torch.Tensor) -> torch.Tensor:
        hidden_Nd = hidden_Nd + layer.o(mixed_NO)
        gate, up = layer.gate_up(rms_norm(hidden_Nd, layer.norm_post_d, self.shape.rms_eps)).chunk(2, -1)
        return hidden_Nd + layer.down(F.silu(gate) * up)

    def _own_basis(self, hidden_Nd: torch.Tensor) -> torch.Tensor:
        return hidden_Nd if self._basis_dd is None else hidden_Nd @ self._basis_dd.T


def _make(weight_OI: torch.Tensor, numerics: Numerics, *, fine: bool = False) -> Linear:
    if numerics == "fp32":
        return Fp32Linear(weight_OI, row_tile=1)
    form = FineInt8Linear if fine else Int8Linear
    return form(weight_OI, levels=int8_levels())
