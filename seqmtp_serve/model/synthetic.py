"""Small made-up models whose MTP module is right as often as one likes: for tests and for runs without a checkpoint.

The head maps the embedding of token t to the token perm(t), so a trunk of weight zero continues every text with perm;
its layers, scaled by `context`, make the text depend on the whole prefix. The module passes the embedding of the newest
token through its fusion, so it guesses perm as well, and misses where context or its own `noise` matters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqmtp_serve.model.config import LlamaConfig

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


def target_tensors(config: LlamaConfig = TINY, *, seed: int = 0, context: float = 0.5) -> dict[str, Tensor]:
    """A target under Hugging Face llama names. `context` 0: the next token depends on the last one only."""
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
        tensors |= _block(config, f"model.layers.{layer}.", generator, context)
    return tensors


def mtp_tensors(
    target: dict[str, Tensor],
    config: LlamaConfig = TINY,
    *,
    seed: int = 1,
    noise: float = 0.3,
    draft_vocab_size: int = 0,
) -> dict[str, Tensor]:
    """A module in the released layout, with the main model's tensors it shares. Larger `noise`: fewer drafts accepted.

    `draft_vocab_size` above 0 restricts the drafts to that many tokens, drawn at random.
    """
    generator = torch.Generator().manual_seed(seed)
    prefix, size = f"model.layers.{config.num_layers}.", config.hidden_size
    shared = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    hidden_half = 0.1 * noise * torch.randn(size, size, generator=generator)
    tensors = {name: target[name] for name in shared if name in target}
    tensors |= _block(config, prefix, generator, noise)
    tensors[f"{prefix}enorm.weight"] = 1.0 + 0.1 * torch.randn(size, generator=generator)
    tensors[f"{prefix}hnorm.weight"] = 1.0 + 0.1 * torch.randn(size, generator=generator)
    tensors[f"{prefix}eh_proj.weight"] = torch.cat((torch.eye(size), hidden_half), 1)
    if draft_vocab_size:
        ids = torch.randperm(config.vocab_size, generator=generator)[:draft_vocab_size]
        tensors[f"{prefix}draft_token_ids"] = ids.sort().values.to(torch.int32)
    return tensors


def _block(config: LlamaConfig, prefix: str, generator: torch.Generator, scale: float) -> dict[str, Tensor]:
    """A decoder block whose two residual outputs are scaled by `scale`."""

    def matrix(num_outputs: int, num_inputs: int, gain: float = 1.0) -> Tensor:
        return torch.randn(num_outputs, num_inputs, generator=generator).mul_(gain * float(num_inputs) ** -0.5)

    size, inner = config.hidden_size, config.intermediate_size
    tensors = {
        "self_attn.q_proj": 2.0 * matrix(config.query_size, size),
        "self_attn.k_proj": 2.0 * matrix(config.kv_size, size),
        "self_attn.v_proj": matrix(config.kv_size, size),
        "self_attn.o_proj": matrix(size, config.query_size, scale),
        "mlp.gate_proj": matrix(inner, size),
        "mlp.up_proj": matrix(inner, size),
        "mlp.down_proj": matrix(size, inner, scale),
        "input_layernorm": 1.0 + 0.1 * torch.randn(size, generator=generator),
        "post_attention_layernorm": 1.0 + 0.1 * torch.randn(size, generator=generator),
    }
    return {f"{prefix}{name}.weight": tensor for name, tensor in tensors.items()}
