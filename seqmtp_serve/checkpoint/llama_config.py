"""The llama family's configuration, from either of its two spellings: `config.json` or GGUF metadata.

Both are translated here and nowhere else. What this engine would compute differently (scaled rotary positions,
biases, another activation) is refused by name: a model that loads must give its own numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from seqmtp_serve.errors import TargetIncomplete
from seqmtp_serve.model.config import LlamaConfig

# Field -> the only value the dense block computes. Absent means that value.
_REQUIRED_VALUES = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "pretraining_tp": 1}


def llama_config_from_hf(found: Mapping[str, Any]) -> LlamaConfig:
    """From a decoded `config.json`. Raises TargetIncomplete naming the field."""
    if found.get("model_type") != "llama":
        raise TargetIncomplete(f"model_type: {found.get('model_type')!r} is not served; llama is")
    for name, only in _REQUIRED_VALUES.items():
        if found.get(name, only) != only:
            raise TargetIncomplete(f"{name}: {found[name]!r} is not supported, only {only!r}")
    # transformers 5 writes rope_parameters with rope_theta inside; older releases write the two apart.
    rope = dict(found.get("rope_parameters") or found.get("rope_scaling") or {})
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise TargetIncomplete(f"rope_scaling: {rope_type!r} is not supported")
    hidden_size, num_heads = _need(found, "hidden_size"), _need(found, "num_attention_heads")
    return _checked(
        LlamaConfig(
            vocab_size=_need(found, "vocab_size"),
            hidden_size=hidden_size,
            num_layers=_need(found, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=found.get("num_key_value_heads") or num_heads,
            head_dim=found.get("head_dim") or hidden_size // num_heads,
            intermediate_size=_need(found, "intermediate_size"),
            rms_eps=found.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta", found.get("rope_theta", 10_000.0))),
            max_position=found.get("max_position_embeddings", 2048),
            tie_word_embeddings=found.get("tie_word_embeddings", False),
        )
    )


def llama_config_from_gguf(metadata: Mapping[str, Any], *, has_head: bool) -> LlamaConfig:
    """From GGUF metadata; the head is tied when the file stores none. Raises TargetIncomplete naming the key."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise TargetIncomplete(f"general.architecture: {architecture!r} is not served; llama is")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise TargetIncomplete(f"llama.rope.scaling.type: {scaling!r} is not supported")
    hidden_size = _need(metadata, "llama.embedding_length")
    num_heads = _need(metadata, "llama.attention.head_count")
    head_dim = metadata.get("llama.attention.key_length", hidden_size // num_heads)
    if metadata.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise TargetIncomplete("llama.rope.dimension_count: partial rotary positions are not supported")
    return _checked(
        LlamaConfig(
            vocab_size=metadata.get("llama.vocab_size") or len(_need(metadata, "tokenizer.ggml.tokens")),
            hidden_size=hidden_size,
            num_layers=_need(metadata, "llama.block_count"),
            num_heads=num_heads,
            num_kv_heads=metadata.get("llama.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            intermediate_size=_need(metadata, "llama.feed_forward_length"),
            rms_eps=_shortest(_need(metadata, "llama.attention.layer_norm_rms_epsilon")),
            rope_theta=_shortest(metadata.get("llama.rope.freq_base", 10_000.0)),
            max_position=_need(metadata, "llama.context_length"),
            tie_word_embeddings=not has_head,
        )
    )


def _need(found: Mapping[str, Any], name: str) -> Any:
    if found.get(name) is None:
        raise TargetIncomplete(f"{name}: not declared")
    return found[name]


def _shortest(value: float) -> float:
    """A float32 as the decimal it was written from: 9.99999974e-06 -> 1e-05, as `config.json` has it."""
    return float(str(np.float32(value)))


def _checked(config: LlamaConfig) -> LlamaConfig:
    if config.num_heads % config.num_kv_heads:
        raise TargetIncomplete(f"num_key_value_heads: {config.num_kv_heads} does not divide {config.num_heads} heads")
    if config.head_dim % 2:
        raise TargetIncomplete(f"head_dim: {config.head_dim} is odd; rotary positions need pairs")
    return config
