"""A tiny random llama target and module, shared by the training tests."""

from __future__ import annotations

import pytest
import torch
from tiny_llama import SHAPE, random_tensors

from seqmtp_serve.model.config import LlamaConfig
from seqmtp_serve.training.loss import Frozen
from seqmtp_serve.training.mtp_module import MtpModule


@pytest.fixture
def shape() -> LlamaConfig:
    return SHAPE


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return random_tensors(SHAPE, seed=0)


@pytest.fixture
def module() -> MtpModule:
    """Random everywhere, gains included."""
    torch.manual_seed(1)
    module = MtpModule(SHAPE)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return module


@pytest.fixture
def frozen(tensors: dict[str, torch.Tensor]) -> Frozen:
    """fp32, over the whole vocabulary."""
    embed = tensors["model.embed_tokens.weight"]
    return Frozen(embed_Vd=embed, norm_d=tensors["model.norm.weight"], head_Vd=embed, norm_eps=SHAPE.rms_eps)
