"""A tiny random llama target, and documents that belong to no model."""

from __future__ import annotations

import torch

from seqmtp_serve.model.config import LlamaConfig
from seqmtp_serve.training.shards import Document

SHAPE = LlamaConfig(
    num_layers=2,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=64,
    rope_theta=10_000.0,
    rms_eps=1e-5,
)


def random_tensors(shape: LlamaConfig, seed: int) -> dict[str, torch.Tensor]:
    """Weights of a whole tiny llama, with gains that are not 1 (a forgotten norm must show)."""
    random = torch.Generator().manual_seed(seed)

    def draw(*size: int, scale: float = 0.3) -> torch.Tensor:
        return torch.randn(size, generator=random) * scale

    d, kv, inner = shape.hidden_size, shape.num_kv_heads * shape.head_dim, shape.intermediate_size
    tensors = {
        "model.embed_tokens.weight": draw(shape.vocab_size, d, scale=1.0),
        "model.norm.weight": 1 + draw(d),
    }
    for layer in range(shape.num_layers):
        sizes = {
            "self_attn.q_proj": (d, d),
            "self_attn.k_proj": (kv, d),
            "self_attn.v_proj": (kv, d),
            "self_attn.o_proj": (d, d),
            "mlp.gate_proj": (inner, d),
            "mlp.up_proj": (inner, d),
            "mlp.down_proj": (d, inner),
        }
        for name, size in sizes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = draw(*size)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = 1 + draw(d)
    return tensors


def random_document(num_tokens: int, prompt_len: int, seed: int) -> Document:
    """Tokens and hidden rows that belong to no model."""
    random = torch.Generator().manual_seed(seed)
    return Document(
        tokens=torch.randint(0, SHAPE.vocab_size, (num_tokens,), generator=random),
        hidden=torch.randn(num_tokens, SHAPE.hidden_size, generator=random).bfloat16(),
        prompt_len=prompt_len,
        greedy=True,
    )
