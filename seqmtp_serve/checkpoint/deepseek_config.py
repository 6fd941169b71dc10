"""The DeepSeek-V3 layout's configuration, from the `config.json` of its families (`mtp_adapters.py` lists them).

Both spellings of the rotary fields are read: `rope_scaling` beside `rope_theta` (as released), and `rope_parameters`
(transformers 5). What this engine would compute differently is refused by name: a model that loads must give its own
numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seqmtp_serve.checkpoint.fp8 import BlockFormat, block_format
from seqmtp_serve.errors import TargetIncomplete
from seqmtp_serve.model.deepseek_config import DeepseekConfig, MoeConfig, YarnConfig

MODEL_TYPES = ("deepseek_v3", "glm4_moe_lite")

_OTHER_FAMILIES = {
    "glm4_moe": "(GLM-4.5, 4.6, 4.7) is not served: its experts are of this layout, but its attention is over grouped "
    "queries, with biases and a partial rotary part, and not over latents",
}
# Field -> the only value that is computed. Absent means that value; some files write a defaulted field as null.
_REQUIRED_VALUES = {
    "attention_bias": False,
    "hidden_act": "silu",
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "ep_size": 1,
    "pretraining_tp": 1,
    "rope_interleave": True,
    "mlp_bias": False,
}
# Field -> why a model that has it is another model.
_FOREIGN = {
    "index_topk": "sparse attention with an indexer (DeepSeek-V3.2) is not computed",
    "index_head_dim": "sparse attention with an indexer (DeepSeek-V3.2) is not computed",
    "index_n_heads": "sparse attention with an indexer (DeepSeek-V3.2) is not computed",
    "sliding_window": "windowed attention is not computed",
    "hc_mult": "hyper-connections (DeepSeek-V4) are not computed",
}
# DeepSeek's configuration class writes these whether a model uses them or not.
_ROPE_FIELDS = {"rope_type", "type", "rope_theta", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
_ROPE_FIELDS |= {"original_max_position_embeddings", "partial_rotary_factor"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekDeclared:
    """What the file says: the model, its family (`model_type`), how many MTP layers follow it, and how it is stored."""

    model: DeepseekConfig
    family: str
    num_mtp_layers: int
    quantization: BlockFormat | None


def deepseek_config_from_hf(found: Mapping[str, Any]) -> DeepseekDeclared:
    """From a decoded `config.json`. Raises TargetIncomplete naming the field."""
    family = found.get("model_type")
    if family not in MODEL_TYPES:
        reason = _OTHER_FAMILIES.get(str(family), "is not served")
        raise TargetIncomplete(f"model_type: {family!r} {reason}; {', '.join(MODEL_TYPES)} are")
    for name, reason in _FOREIGN.items():
        if found.get(name) is not None:
            raise TargetIncomplete(f"{name}: {reason}")
    for name, only in _REQUIRED_VALUES.items():
        if found.get(name) not in (None, only):
            raise TargetIncomplete(f"{name}: {found[name]!r} is not supported, only {only!r}")
    theta, yarn = _rope(found)
    moe = MoeConfig(
        num_experts=_count(found, "n_routed_experts"),
        num_shared=_count(found, "n_shared_experts"),
        top_k=_count(found, "num_experts_per_tok"),
        intermediate_size=_count(found, "moe_intermediate_size"),
        num_groups=_count(found, "n_group", 1),
        top_k_groups=_count(found, "topk_group", 1),
        normalise_weights=bool(found.get("norm_topk_prob", True)),
        routed_scaling=float(found.get("routed_scaling_factor", 1.0)),
    )
    config = DeepseekConfig(
        vocab_size=_count(found, "vocab_size"),
        hidden_size=_count(found, "hidden_size"),
        num_layers=_count(found, "num_hidden_layers"),
        num_heads=_count(found, "num_attention_heads"),
        q_lora_rank=_count(found, "q_lora_rank", 0),
        kv_lora_rank=_count(found, "kv_lora_rank"),
        nope_head_dim=_count(found, "qk_nope_head_dim"),
        rope_head_dim=_count(found, "qk_rope_head_dim"),
        v_head_dim=_count(found, "v_head_dim"),
        intermediate_size=_count(found, "intermediate_size"),
        num_dense_layers=_dense_layers(found),
        moe=moe,
        rms_eps=float(found.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        max_position=_count(found, "max_position_embeddings"),
        yarn=yarn,
        tie_word_embeddings=bool(found.get("tie_word_embeddings", False)),
    )
    _check(config, found)
    quantization = found.get("quantization_config")
    return DeepseekDeclared(
        model=config,
        family=family,
        num_mtp_layers=_mtp_layers(found),
        quantization=None if quantization is None else block_format(quantization),
    )


def _rope(found: Mapping[str, Any]) -> tuple[float, YarnConfig | None]:
    """(theta, YaRN or None). `max_position_embeddings` is the scaled context; YaRN names the one before scaling."""
    newer, older = found.get("rope_parameters"), found.get("rope_scaling")
    rope: Mapping[str, Any] = newer if newer is not None else older or {}
    label = "rope_scaling" if newer is None else "rope_parameters"
    for name in sorted(rope.keys() - _ROPE_FIELDS):
        raise TargetIncomplete(f"{label}.{name}: is not computed")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise TargetIncomplete(f"{label}.partial_rotary_factor: the rotary part has a size of its own here")
    theta = float(rope.get("rope_theta", found.get("rope_theta", 10_000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise TargetIncomplete(f"{label}: {kind!r} is not supported, yarn is")
    if rope.get("original_max_position_embeddings") is None or rope.get("factor") is None:
        raise TargetIncomplete(f"{label}: yarn needs factor and original_max_position_embeddings")
    if (rope.get("mscale") is None) != (rope.get("mscale_all_dim") is None):
        raise TargetIncomplete(f"{label}: mscale and mscale_all_dim are declared together or not at all")
    names = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    # Without the two, cos and sin take the whole correction, and the softmax scale none (as transformers has it).
    values = {"mscale": 1.0, "mscale_all_dim": 0.0} | {name: rope[name] for name in names if rope.get(name) is not None}
    return theta, YarnConfig(
        original_max_position=int(rope["original_max_position_embeddings"]),
        **{name: float(value) for name, value in values.items()},
    )


def _mtp_layers(found: Mapping[str, Any]) -> int:
    """`num_nextn_predict_layers`, or transformers' name for it. A file that says neither has none."""
    named = {
        name: found[name] for name in ("num_nextn_predict_layers", "num_mtp_layers") if found.get(name) is not None
    }
    if len(set(named.values())) > 1:
        raise TargetIncomplete(f"num_mtp_layers: {named['num_mtp_layers']} contradicts num_nextn_predict_layers")
    return int(next(iter(named.values()), 0))


def _dense_layers(found: Mapping[str, Any]) -> int:
    """How many layers at the front have one dense MLP: `first_k_dense_replace`, or GLM's list of kinds."""
    kinds, num_layers = found.get("mlp_layer_types"), _count(found, "num_hidden_layers")
    if kinds is None:
        return _count(found, "first_k_dense_replace")
    num_dense = list(kinds).count("dense")
    if list(kinds[:num_layers]) != ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense):
        raise TargetIncomplete("mlp_layer_types: only dense layers in front, then sparse ones, are supported")
    return num_dense


def _count(found: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = found.get(name, default)
    if value is None:
        value = default
    if value is None:
        raise TargetIncomplete(f"{name}: not declared")
    if type(value) is not int or value < 0:
        raise TargetIncomplete(f"{name}: must be a number of things, is {value!r}")
    return value


def _check(config: DeepseekConfig, found: Mapping[str, Any]) -> None:
    """The arithmetic that the gate and the heads need to be whole."""
    moe = config.moe
    if found.get("num_key_value_heads") not in (None, config.num_heads):
        raise TargetIncomplete("num_key_value_heads: latent attention has as many as query heads")
    if config.rope_head_dim % 2 or not config.rope_head_dim:
        raise TargetIncomplete(f"qk_rope_head_dim: {config.rope_head_dim} makes no rotary pairs")
    if config.num_dense_layers > config.num_layers:
        raise TargetIncomplete(f"first_k_dense_replace: {config.num_dense_layers} of {config.num_layers} layers")
    if not moe.num_groups or moe.num_experts % moe.num_groups:
        raise TargetIncomplete(f"n_group: {moe.num_groups} does not divide {moe.num_experts} experts")
    per_group = moe.num_experts // moe.num_groups
    if moe.num_groups > 1 and per_group < 2:
        raise TargetIncomplete("n_group: a group's score is the sum of its two best, so a group needs two experts")
    if not 0 < moe.top_k_groups <= moe.num_groups:
        raise TargetIncomplete(f"topk_group: {moe.top_k_groups} of {moe.num_groups} groups")
    if not 0 < moe.top_k <= moe.top_k_groups * per_group:
        raise TargetIncomplete(f"num_experts_per_tok: {moe.top_k} of {moe.top_k_groups * per_group} in the best groups")
