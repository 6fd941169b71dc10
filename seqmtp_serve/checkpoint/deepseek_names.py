"""Tensor names of the DeepSeek-V3 layout: what each must be called and shaped, as transformers saves them.

Shapes: V vocabulary, d hidden, H heads, n/r/v sizes of a head's plain, rotary and value part, Q and C latent ranks of
queries and of keys with values, F dense feed-forward, I one expert's, E routed and S shared experts.
"""

from __future__ import annotations

import re
from collections.abc import Container

from seqmtp_serve.checkpoint.names import (
    DRAFT_TOKEN_IDS,
    EH_PROJ,
    EMBEDDING,
    ENORM,
    FINAL_NORM,
    HEAD,
    HNORM,
    SHARED_NORM,
    layer_prefix,
)
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.deepseek_config import DeepseekConfig

_EXPERT = re.compile(r"\bmlp\.experts\.(\d+)\.")


def attention_shapes(config: DeepseekConfig) -> dict[str, tuple[int, ...]]:
    """Multi-head latent attention; one whole query projection when the query has no latent."""
    d, num_heads, query_rank, rank = config.hidden_size, config.num_heads, config.q_lora_rank, config.kv_lora_rank
    query_size = num_heads * config.query_head_dim
    query: dict[str, tuple[int, ...]] = {"q_proj.weight": (query_size, d)}
    if query_rank:
        query = {
            "q_a_proj.weight": (query_rank, d),
            "q_a_layernorm.weight": (query_rank,),
            "q_b_proj.weight": (query_size, query_rank),
        }
    shapes = query | {
        "kv_a_proj_with_mqa.weight": (config.latent_size, d),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (num_heads * (config.nope_head_dim + config.v_head_dim), rank),
        "o_proj.weight": (d, num_heads * config.v_head_dim),
    }
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def feed_forward_shapes(config: DeepseekConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """A dense SwiGLU in the first layers, then gate, routed experts and the shared ones (as one SwiGLU)."""
    d, moe = config.hidden_size, config.moe
    if not config.is_moe(layer):
        return _swiglu("mlp", d, config.intermediate_size)
    shapes: dict[str, tuple[int, ...]] = {
        "mlp.gate.weight": (moe.num_experts, d),
        "mlp.gate.e_score_correction_bias": (moe.num_experts,),
    }
    for expert in range(moe.num_experts):
        shapes |= _swiglu(f"mlp.experts.{expert}", d, moe.intermediate_size)
    if moe.num_shared:
        shapes |= _swiglu("mlp.shared_experts", d, moe.num_shared * moe.intermediate_size)
    return shapes


def block_shapes(config: DeepseekConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Name below the layer prefix -> shape, for one decoder block."""
    norms: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (config.hidden_size,),
        "post_attention_layernorm.weight": (config.hidden_size,),
    }
    return norms | attention_shapes(config) | feed_forward_shapes(config, layer)


def target_shapes(config: DeepseekConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a target must have. A tied head is the embedding's own object, so it is not listed."""
    shapes = {EMBEDDING: (config.vocab_size, config.hidden_size), FINAL_NORM: (config.hidden_size,)}
    for layer in range(config.num_layers):
        shapes |= {layer_prefix(layer) + name: shape for name, shape in block_shapes(config, layer).items()}
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def mtp_layer_shapes(config: DeepseekConfig, mtp: MtpConfig) -> dict[str, tuple[int, ...]]:
    """Name below the layer prefix -> shape, for one MTP layer. Its block is a mixture of experts."""
    d = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {ENORM: (d,), HNORM: (d,), EH_PROJ: (d, 2 * d)}
    shapes |= block_shapes(config, config.num_layers)
    if mtp.final_norm_owner == "mtp":
        shapes[SHARED_NORM] = (d,)
    if mtp.draft_vocab_size:
        shapes[DRAFT_TOKEN_IDS] = (mtp.draft_vocab_size,)
    return shapes


def is_read_by(name: str, experts: Container[int] | None) -> bool:
    """Whether a process that holds `experts` (None: all) reads this tensor: everything but other experts' weights."""
    found = _EXPERT.search(name)
    return experts is None or found is None or int(found[1]) in experts


def _swiglu(prefix: str, d: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (inner, d),
        f"{prefix}.up_proj.weight": (inner, d),
        f"{prefix}.down_proj.weight": (d, inner),
    }
