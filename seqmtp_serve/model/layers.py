"""The pieces of a llama decoder block: RMSNorm, and the block itself over a paged pool.

Shapes: N rows, d hidden, E fused query/key/value width, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from seqmtp_serve.config import AUTO, Kernels
from seqmtp_serve.errors import InvalidField
from seqmtp_serve.model.attention import AttentionPlan, Span, attend, plan_attention
from seqmtp_serve.model.config import LlamaConfig
from seqmtp_serve.model.linear import make_linear
from seqmtp_serve.model.numerics import Numerics
from seqmtp_serve.model.rope import fused_rotation, interleave_pairs, rotate_rows_, rotations


class RmsNorm:
    """`x * gain / sqrt(mean(x^2) + eps)` in four operations: sqrt(|x|^2 + d * eps) is a hypotenuse."""

    def __init__(self, gain_d: Tensor, eps: float, *, plus_one: bool = False) -> None:
        size = gain_d.shape[0]
        gain_d = gain_d.float() + 1.0 if plus_one else gain_d.float()
        self._gain_d = gain_d * size**0.5
        self._eps_norm = torch.tensor((eps * size) ** 0.5, device=gain_d.device)

    def __call__(self, x_Nd: Tensor) -> Tensor:
        norm_N1: Tensor = torch.linalg.vector_norm(x_Nd, dim=-1, keepdim=True).hypot_(self._eps_norm)
        return (x_Nd / norm_N1).mul_(self._gain_d)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What the layers of one forward pass share: the rotation of each fused row and the attention plan."""

    rotation_NC: Tensor
    attention: AttentionPlan


def block_weights(tensors: Mapping[str, Tensor], prefix: str) -> Callable[[str], Tensor]:
    """A block's tensors by their short names, as float32."""
    return lambda name: tensors[f"{prefix}{name}.weight"].float()


def head_weight(tensors: Mapping[str, Tensor], *, tied: bool) -> Tensor:
    """`[V, d]` weight of the output head: the embedding itself when the two are tied."""
    return tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]


def only_kernels(asked: Kernels, only: dict[str, str]) -> dict[str, str]:
    """`only`: a family's kernels where there is no choice. Raises InvalidField when another one is asked for."""
    for setting, name in asdict(asked).items():
        if name not in (AUTO, only.get(setting)):
            has = f"only {only[setting]}" if setting in only else "none"
            message = f"{setting} backend {name}: this model has {has}; leave it {AUTO}"
            raise InvalidField(message, param=f"kernels.{setting}")
    return only


class LlamaLayers:
    """Builds the family's blocks and plans their passes; see `family.Layers`."""

    tally = None  # no experts

    def __init__(self, config: LlamaConfig, page_size: int, max_len: int, numerics: Numerics) -> None:
        """Raises InvalidField when a backend is asked for that only latent attention or experts have."""
        self._config, self._page_size, self._numerics = config, page_size, numerics
        self.kernels = only_kernels(numerics.kernels, {"attention": "paged"})
        self._rotations = rotations(config.head_dim, config.rope_theta, max_len).to(numerics.device)

    def plan(self, spans: list[Span], positions_N: Tensor) -> Pass:
        """`positions_N` are RoPE positions (not slots) of the rows, in span order."""
        return Pass(
            rotation_NC=fused_rotation(
                self._rotations.index_select(0, positions_N).unsqueeze(1),
                self._config.num_heads + self._config.num_kv_heads,
                self._config.num_kv_heads,
            ),
            attention=plan_attention(spans, self._config, self._page_size, self._numerics),
        )

    def block(self, tensors: Mapping[str, Tensor], layer: int) -> DecoderBlock:
        """The block stored under `model.layers.{layer}.`."""
        weight = block_weights(tensors, f"model.layers.{layer}.")
        return DecoderBlock(weight, self._config, self._page_size, self._numerics)


class DecoderBlock:
    """h += attention(norm(h)); h += mlp(norm(h)). Query, key and value are one product; so are gate and up."""

    def __init__(
        self, weight: Callable[[str], Tensor], config: LlamaConfig, page_size: int, numerics: Numerics
    ) -> None:
        """`weight` gives a tensor by its short name: `block_weights`, or rotated ones."""
        self._config, self._page_size = config, page_size
        self._attention_norm = RmsNorm(weight("input_layernorm"), config.rms_eps)
        self._mlp_norm = RmsNorm(weight("post_attention_layernorm"), config.rms_eps)
        self._qkv = make_linear(
            (
                interleave_pairs(weight("self_attn.q_proj"), config.head_dim),
                interleave_pairs(weight("self_attn.k_proj"), config.head_dim),
                weight("self_attn.v_proj"),
            ),
            numerics,
        )
        self._out = make_linear((weight("self_attn.o_proj"),), numerics)
        self._gate_up = make_linear((weight("mlp.gate_proj"), weight("mlp.up_proj")), numerics)
        self._down = make_linear((weight("mlp.down_proj"),), numerics, fine=True)  # SwiGLU makes huge channels

    def __call__(self, hidden_Nd: Tensor, pool_SE: Tensor, shared: Pass) -> Tensor:
        """Returns the block's residual-completed output; writes the rows' keys and values to `pool_SE`."""
        config = self._config
        qkv_NE = self._qkv(self._attention_norm(hidden_Nd))
        rotate_rows_(qkv_NE, shared.rotation_NC)
        mixed = attend(qkv_NE, pool_SE, shared.attention, config, self._page_size)
        hidden_Nd = self._out(mixed).add_(hidden_Nd)
        gate, up = self._gate_up(self._mlp_norm(hidden_Nd)).chunk(2, -1)
        return self._down(F.silu(gate).mul_(up)).add_(hidden_Nd)
