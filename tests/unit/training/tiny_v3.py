"""A DeepSeek-V3-layout model small enough to run by hand, and streams for it."""

from __future__ import annotations

import random
from typing import Any

import torch

from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.deepseek_config import DeepseekConfig, MoeConfig
from seqmtp_serve.training.v3.model import V3Model, initialise

CONFIG = DeepseekConfig(
    vocab_size=48,
    hidden_size=24,
    num_layers=2,
    num_heads=2,
    q_lora_rank=12,
    kv_lora_rank=16,
    nope_head_dim=8,
    rope_head_dim=4,
    v_head_dim=6,
    intermediate_size=40,
    num_dense_layers=1,
    moe=MoeConfig(
        num_experts=8, num_shared=1, top_k=2, intermediate_size=12, num_groups=4, top_k_groups=2, routed_scaling=1.5
    ),
    max_position=64,
)


def tiny_v3(modules: int = 1, *, config: DeepseekConfig = CONFIG, seed: int = 1, **kwargs: Any) -> V3Model:
    """Random everywhere: gains and gate biases too."""
    mtp = kwargs.pop("mtp", MtpConfig(num_modules=modules))
    model = V3Model(config, mtp, **kwargs)
    initialise(model, seed=seed, std=0.3)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [p for p in model.parameters() if p.ndim == 1] + list(model.buffers()):
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.2)
    return model


def random_documents(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(CONFIG.vocab_size) for _ in range(length)] for length in lengths]
