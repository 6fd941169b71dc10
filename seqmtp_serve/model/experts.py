"""The feed-forward parts of a mixture-of-experts layer: one SwiGLU, and the routed experts that a process holds.

Shapes: N rows, d hidden, F feed-forward width, P (token, expert) pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from seqmtp_serve.model.backends.grouped_gemm import GROUPED_GEMM, GemmCase, GroupedGemm, Groups
from seqmtp_serve.model.linear import make_linear
from seqmtp_serve.model.numerics import Numerics


@dataclass(frozen=True, slots=True, kw_only=True)
class SwiGluWeights:
    """down(silu(gate(x)) * up(x)), without biases."""

    gate_Fd: Tensor
    up_Fd: Tensor
    down_dF: Tensor

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], prefix: str) -> SwiGluWeights:
        """From Hugging Face names: `{prefix}gate_proj.weight` and so on."""
        gate, up, down = (tensors[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
        return cls(gate_Fd=gate, up_Fd=up, down_dF=down)


class SwiGlu:
    """One feed-forward network, `[N, d]` to `[N, d]`: an expert, the shared experts, or a dense layer's MLP."""

    def __init__(self, weights: SwiGluWeights, numerics: Numerics) -> None:
        self._gate_up = make_linear((weights.gate_Fd, weights.up_Fd), numerics)
        self._down = make_linear((weights.down_dF,), numerics, fine=True)  # SwiGLU makes huge channels

    def __call__(self, x_Nd: Tensor) -> Tensor:
        gate, up = self._gate_up(x_Nd).chunk(2, -1)
        return self._down(F.silu(gate).mul_(up))


def choose_gemm(
    num_experts: int, hidden_size: int, intermediate_size: int, numerics: Numerics
) -> tuple[GroupedGemm, GemmCase]:
    """What computes `num_experts` experts together. Raises InvalidField when the backend asked for cannot."""
    case = GemmCase(
        num_groups=num_experts,
        num_inputs=hidden_size,
        num_outputs=2 * intermediate_size,
        numerics=numerics,
        dtype=numerics.product_dtype,
    )
    return GROUPED_GEMM.choose(case, named=numerics.kernels.experts), case


class Experts:
    """The routed experts of this process, by global id: two grouped products (`backends/grouped_gemm.py`) around the
    activation. An expert without a pair is not computed."""

    def __init__(self, weights: Mapping[int, SwiGluWeights], numerics: Numerics) -> None:
        held = [weights[expert] for expert in sorted(weights)]
        self._ids = torch.tensor(sorted(weights), device=numerics.device)
        width, hidden_size = held[0].gate_Fd.shape if held else (0, 0)
        gemm, case = choose_gemm(len(held), hidden_size, width, numerics)
        self._gate_up = gemm.product([(one.gate_Fd, one.up_Fd) for one in held], case)
        self._down = gemm.product([(one.down_dF,) for one in held], case, fine=True)  # SwiGLU makes huge channels

    def __call__(self, rows_Pd: Tensor, experts_P: Tensor) -> tuple[Tensor, Tensor | int]:
        """Pair p is row p through expert `experts_P[p]`: outputs `[P, d]`, and how many experts were touched."""
        if not len(rows_Pd):
            return rows_Pd, 0
        sorted_P, order_P = experts_P.sort(stable=True)
        groups = Groups(torch.searchsorted(sorted_P, self._ids, right=True))
        gate, up = self._gate_up(rows_Pd[order_P], groups).chunk(2, -1)
        out_Pd = self._down(F.silu(gate).mul_(up), groups)
        return torch.empty_like(rows_Pd).index_copy_(0, order_P, out_Pd), groups.num_used()
