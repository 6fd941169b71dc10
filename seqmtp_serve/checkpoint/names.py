"""Tensor names, one table a family: what each must be called and shaped, and what other formats call it.

Shapes: V vocabulary, d hidden, H query heads, G key-value heads, D head size, F feed-forward, W draft sub-vocabulary.
Inside this project every tensor has its Hugging Face name; an MTP layer n has the released DeepSeek-V3 layout
`model.layers.{n}.{enorm,hnorm,eh_proj,...}` around a block of the target's own family.
"""

from __future__ import annotations

from seqmtp_serve.model.config import LlamaConfig, MtpConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
ENORM, HNORM, EH_PROJ = "enorm.weight", "hnorm.weight", "eh_proj.weight"
DRAFT_TOKEN_IDS = "draft_token_ids"
SHARED_NORM = "shared_head.norm.weight"
# Copies of the main model's own tensors that released checkpoints store again in the MTP layer.
MTP_DUPLICATES = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": HEAD}
# Stored by old exporters, derived from the rotary contract: nothing reads them.
DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)

_GGUF_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GGUF_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name_of_gguf(name: str) -> str:
    """The Hugging Face name of a llama GGUF tensor; a name outside the table stays as it is, and fails the gate."""
    stem, _, kind = name.rpartition(".")
    if stem in _GGUF_TOP:
        return f"{_GGUF_TOP[stem]}.{kind}"
    match stem.split("."):
        case ["blk", layer, part] if part in _GGUF_BLOCK:
            return f"model.layers.{layer}.{_GGUF_BLOCK[part]}.{kind}"
    return name


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def llama_block_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name below the layer prefix -> shape, for one dense block."""
    d, ffn = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "input_layernorm.weight": (d,),
        "self_attn.q_proj.weight": (query, d),
        "self_attn.k_proj.weight": (key, d),
        "self_attn.v_proj.weight": (key, d),
        "self_attn.o_proj.weight": (d, query),
        "post_attention_layernorm.weight": (d,),
        "mlp.gate_proj.weight": (ffn, d),
        "mlp.up_proj.weight": (ffn, d),
        "mlp.down_proj.weight": (d, ffn),
    }


def llama_target_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a dense target must have. A tied head is the embedding's own object, so it is not listed."""
    block = llama_block_shapes(config)
    shapes = {EMBEDDING: (config.vocab_size, config.hidden_size), FINAL_NORM: (config.hidden_size,)}
    for layer in range(config.num_layers):
        shapes |= {layer_prefix(layer) + name: shape for name, shape in block.items()}
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def mtp_layer_shapes(config: LlamaConfig, mtp: MtpConfig) -> dict[str, tuple[int, ...]]:
    """Name below the layer prefix -> shape, for one MTP layer: fusion, block, and what its declarations add."""
    d = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {ENORM: (d,), HNORM: (d,), EH_PROJ: (d, 2 * d)} | llama_block_shapes(config)
    if mtp.final_norm_owner == "mtp":
        shapes[SHARED_NORM] = (d,)
    if mtp.draft_vocab_size:
        shapes[DRAFT_TOKEN_IDS] = (mtp.draft_vocab_size,)
    return shapes
