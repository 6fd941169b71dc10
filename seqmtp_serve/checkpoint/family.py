"""What the two model families must be called, shaped and declared as: the one place that tells them apart."""

from __future__ import annotations

from dataclasses import dataclass

from seqmtp_serve.checkpoint import deepseek_names, names
from seqmtp_serve.checkpoint.mtp_manifest import RopeContract
from seqmtp_serve.model.config import LlamaConfig, MtpConfig
from seqmtp_serve.model.family import ModelConfig

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """What a family's files must agree on, in the words of a manifest.

    A cache layout says what lies in a slot: pages of another layout hold other numbers, though their size be equal.
    """

    architecture: str
    rope: RopeContract
    expert_layout: str
    cache_layout: str
    mtp_cache_layout: str


def target_shapes(config: ModelConfig) -> Shapes:
    """Every tensor of a target, by full name."""
    if isinstance(config, LlamaConfig):
        return names.llama_target_shapes(config)
    return deepseek_names.target_shapes(config)


def mtp_layer_shapes(config: ModelConfig, mtp: MtpConfig) -> Shapes:
    """Every tensor of one MTP layer, by its name below the layer prefix."""
    if isinstance(config, LlamaConfig):
        return names.mtp_layer_shapes(config, mtp)
    return deepseek_names.mtp_layer_shapes(config, mtp)


def contract_of(config: ModelConfig) -> Contract:
    """The family's contract for a model of these numbers."""
    if isinstance(config, LlamaConfig):
        return Contract(
            architecture="llama",
            rope=RopeContract(theta=config.rope_theta, head_dim=config.head_dim),
            expert_layout="dense",
            cache_layout="kv[slot, head]: slot = position, keys after rotary, rotate_half order",
            mtp_cache_layout=(
                "kv[slot, head]: slot = base + depth, keys after rotary at position = base, rotate_half order"
            ),
        )
    moe = config.moe
    row = f"{config.kv_lora_rank} latent values after their norm, {config.rope_head_dim} of the key after rotary"
    return Contract(
        architecture="deepseek_v3",
        rope=RopeContract(
            theta=config.rope_theta, head_dim=config.rope_head_dim, layout="interleaved", yarn=config.yarn
        ),
        expert_layout=(
            f"one tensor an expert: {moe.num_experts} routed x {moe.intermediate_size}, {moe.num_shared} shared, "
            f"{config.num_dense_layers} dense layers"
        ),
        cache_layout=f"latent[slot]: slot = position, {row}, interleaved order",
        mtp_cache_layout=f"latent[slot]: slot = base + depth, {row} at position = base, interleaved order",
    )
