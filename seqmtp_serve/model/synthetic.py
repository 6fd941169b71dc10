"""Small made-up models whose MTP modules are right as often as one likes: for tests and for runs without a checkpoint.

The head maps the embedding of token t to the token perm(t), so a trunk of weight zero continues every text with perm;
its layers, scaled by `context`, make the text depend on the whole prefix. The module passes the embedding of the newest
token through its fusion, so it guesses perm as well, and misses where context or its own `noise` matters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqmtp_serve.model.config import LlamaConfig
from seqmtp_serve.model.deepseek_config import DeepseekConfig, MoeConfig, YarnConfig

TINY = LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_position=256,
    tie_word_embeddings=False,
)

TINY_V3 = DeepseekConfig(
    vocab_size=96,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    q_lora_rank=24,
    kv_lora_rank=16,
    nope_head_dim=8,
    rope_head_dim=4,
    v_head_dim=6,
    intermediate_size=48,
    num_dense_layers=1,
    moe=MoeConfig(
        num_experts=8, num_shared=1, top_k=3, intermediate_size=16, num_groups=4, top_k_groups=2, routed_scaling=1.5
    ),
    max_position=256,
    yarn=YarnConfig(factor=4.0, original_max_position=64),
)


def target_tensors(
    config: LlamaConfig | DeepseekConfig = TINY, *, seed: int = 0, context: float = 0.5
) -> dict[str, Tensor]:
    """A target under Hugging Face names. `context` 0: the next token depends on the last one only."""
    assert not config.tie_word_embeddings, "the head holds the permutation, the embedding does not"
    generator = torch.Generator().manual_seed(seed)
    embed_Vd = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    permutation = torch.randperm(config.vocab_size, generator=generator)
    head_Vd = torch.empty_like(embed_Vd)
    head_Vd[permutation] = embed_Vd
    tensors = {
        "model.embed_tokens.weight": embed_Vd,
        "model.norm.weight": 1.0 + 0.1 * torch.randn(config.hidden_size, generator=generator),
        "lm_head.weight": head_Vd,
    }
    for layer in range(config.num_layers):
        tensors |= _block(config, layer, generator, context)
    return tensors


def mtp_tensors(
    target: dict[str, Tensor],
    config: LlamaConfig | DeepseekConfig = TINY,
    *,
    seed: int = 1,
    noise: float = 0.3,
    draft_vocab_size: int = 0,
    num_modules: int = 1,
) -> dict[str, Tensor]:
    """Modules in the released layout, with the main model's tensors they share. Larger `noise`: fewer drafts accepted.

    `draft_vocab_size` above 0 restricts the drafts to that many tokens, drawn at random. Modules of the DeepSeek layout
    bring a final norm of their own, which is not the main one.
    """
    generator = torch.Generator().manual_seed(seed)
    size = config.hidden_size
    shared = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    tensors = {name: target[name] for name in shared if name in target}
    for layer in range(config.num_layers, config.num_layers + num_modules):
        prefix = f"model.layers.{layer}."
        hidden_half = 0.1 * noise * torch.randn(size, size, generator=generator)
        tensors |= _block(config, layer, generator, noise)
        tensors[f"{prefix}enorm.weight"] = 1.0 + 0.1 * torch.randn(size, generator=generator)
        tensors[f"{prefix}hnorm.weight"] = 1.0 + 0.1 * torch.randn(size, generator=generator)
        tensors[f"{prefix}eh_proj.weight"] = torch.cat((torch.eye(size), hidden_half), 1)
        if isinstance(config, DeepseekConfig):
            tensors[f"{prefix}shared_head.norm.weight"] = 1.0 + 0.1 * torch.randn(size, generator=generator)
    if draft_vocab_size:
        ids = torch.randperm(config.vocab_size, generator=generator)[:draft_vocab_size]
        tensors[f"model.layers.{config.num_layers}.draft_token_ids"] = ids.sort().values.to(torch.int32)
    return tensors


def _block(
    config: LlamaConfig | DeepseekConfig, layer: int, generator: torch.Generator, scale: float
) -> dict[str, Tensor]:
    """A decoder block whose two residual outputs are scaled by `scale`."""
    draw = _Draw(generator)
    tensors = (
        _latent_block(config, layer, draw, scale)
        if isinstance(config, DeepseekConfig)
        else _llama_block(config, draw, scale)
    )
    return {f"model.layers.{layer}.{name}": tensor for name, tensor in tensors.items()}


class _Draw:
    """Random weights that keep the size of what they multiply, and gains about one."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def matrix(self, num_outputs: int, num_inputs: int, gain: float = 1.0) -> Tensor:
        values = torch.randn(num_outputs, num_inputs, generator=self._generator)
        return values.mul_(gain * float(num_inputs) ** -0.5)

    def gain(self, size: int) -> Tensor:
        return 1.0 + 0.1 * torch.randn(size, generator=self._generator)

    def bias(self, size: int) -> Tensor:
        return 0.3 * torch.randn(size, generator=self._generator)


def _llama_block(config: LlamaConfig, draw: _Draw, scale: float) -> dict[str, Tensor]:
    size, inner, matrix = config.hidden_size, config.intermediate_size, draw.matrix
    tensors = {
        "self_attn.q_proj": 2.0 * matrix(config.query_size, size),
        "self_attn.k_proj": 2.0 * matrix(config.kv_size, size),
        "self_attn.v_proj": matrix(config.kv_size, size),
        "self_attn.o_proj": matrix(size, config.query_size, scale),
        "mlp.gate_proj": matrix(inner, size),
        "mlp.up_proj": matrix(inner, size),
        "mlp.down_proj": matrix(size, inner, scale),
        "input_layernorm": draw.gain(size),
        "post_attention_layernorm": draw.gain(size),
    }
    return {f"{name}.weight": tensor for name, tensor in tensors.items()}


def _latent_block(config: DeepseekConfig, layer: int, draw: _Draw, scale: float) -> dict[str, Tensor]:
    """Latent attention and a dense SwiGLU or experts. Gate biases are large enough to change the choice, either way."""
    size, moe, matrix = config.hidden_size, config.moe, draw.matrix
    query_inputs = config.q_lora_rank or size
    tensors = {
        "self_attn.kv_a_proj_with_mqa": 2.0 * matrix(config.latent_size, size),
        "self_attn.kv_a_layernorm": draw.gain(config.kv_lora_rank),
        "self_attn.kv_b_proj": matrix(
            config.num_heads * (config.nope_head_dim + config.v_head_dim), config.kv_lora_rank
        ),
        "self_attn.o_proj": matrix(size, config.num_heads * config.v_head_dim, scale),
        "input_layernorm": draw.gain(size),
        "post_attention_layernorm": draw.gain(size),
    }
    if config.q_lora_rank:
        tensors["self_attn.q_a_proj"] = matrix(config.q_lora_rank, size)
        tensors["self_attn.q_a_layernorm"] = draw.gain(config.q_lora_rank)
    tensors["self_attn.q_b_proj" if config.q_lora_rank else "self_attn.q_proj"] = 2.0 * matrix(
        config.query_size, query_inputs
    )

    def swiglu(name: str, inner: int) -> dict[str, Tensor]:
        gate, up, down = matrix(inner, size), matrix(inner, size), matrix(size, inner, scale)
        return {f"{name}.gate_proj": gate, f"{name}.up_proj": up, f"{name}.down_proj": down}

    if not config.is_moe(layer):
        tensors |= swiglu("mlp", config.intermediate_size)
    else:
        tensors["mlp.gate"] = 2.0 * matrix(moe.num_experts, size)
        for expert in range(moe.num_experts):
            tensors |= swiglu(f"mlp.experts.{expert}", moe.intermediate_size)
        if moe.num_shared:
            tensors |= swiglu("mlp.shared_experts", moe.num_shared * moe.intermediate_size)
    named = {f"{name}.weight": tensor for name, tensor in tensors.items()}
    if config.is_moe(layer):
        named["mlp.gate.e_score_correction_bias"] = draw.bias(moe.num_experts)
    return named
