"""Random mixture-of-experts layers for the tests of gate, experts and dispatch."""

from __future__ import annotations

import torch
from torch import Tensor

from seqmtp_serve.model.deepseek_config import MoeConfig
from seqmtp_serve.model.experts import SwiGluWeights
from seqmtp_serve.model.moe import MoeWeights

SIZE = 40
MOE = MoeConfig(
    num_experts=16,
    num_shared=2,
    top_k=4,
    intermediate_size=24,
    num_groups=4,
    top_k_groups=2,
    routed_scaling=2.5,
)


def moe_weights(config: MoeConfig = MOE, *, seed: int = 0, bias: float = 0.2) -> MoeWeights:
    generator = torch.Generator().manual_seed(seed)

    def matrix(num_outputs: int, num_inputs: int) -> Tensor:
        return torch.randn(num_outputs, num_inputs, generator=generator) / num_inputs**0.5

    def swiglu(inner: int) -> SwiGluWeights:
        return SwiGluWeights(gate_Fd=matrix(inner, SIZE), up_Fd=matrix(inner, SIZE), down_dF=matrix(SIZE, inner))

    return MoeWeights(
        gate_Ed=2.0 * matrix(config.num_experts, SIZE),
        bias_E=bias * torch.randn(config.num_experts, generator=generator),
        experts={expert: swiglu(config.intermediate_size) for expert in range(config.num_experts)},
        shared=swiglu(config.num_shared * config.intermediate_size) if config.num_shared else None,
    )


def tokens(num_tokens: int, *, seed: int = 7) -> Tensor:
    return torch.randn(num_tokens, SIZE, generator=torch.Generator().manual_seed(seed))
