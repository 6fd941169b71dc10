"""The feed-forward parts of a mixture-of-experts layer: one SwiGLU, and the routed experts that a process holds.

Shapes: N rows, d hidden, F feed-forward width, P (token, expert) pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from seqmtp_serve.model.backends.grouped_gemm import GROUPED_GEMM, GemmCase
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


class Experts:
    """The routed experts of this process, by global id. An expert without a pair is not computed."""

    def __init__(self, weights: Mapping[int, SwiGluWeights], numerics: Numerics) -> None:
        self._experts = {expert: SwiGlu(one, numerics) for expert, one in weights.items()}

    def __call__(self, rows_Pd: Tensor, experts_P: Tensor) -> tuple[Tensor, int]:
        """Pair p is row p through expert `experts_P[p]`: outputs `[P, d]`, and how many experts were touched."""
        if not len(rows_Pd):
            return rows_Pd, 0
        order_P = experts_P.argsort(stable=True)
        touched, counts = torch.unique_consecutive(experts_P[order_P], return_counts=True)
        groups = torch.split(rows_Pd[order_P], counts.tolist())
        out = [self._experts[expert](rows) for expert, rows in zip(touched.tolist(), groups, strict=True)]
        return torch.empty_like(rows_Pd).index_copy_(0, order_P, torch.cat(out)), len(out)


class GroupedExperts:
    """The same for `fast` numerics in fp32: one product for all experts (`backends/grouped_gemm.py`), not one for each.

    How many rows its neighbours have may change a row's last bits, which `invariant` numerics must not.
    """

    def __init__(self, weights: Mapping[int, SwiGluWeights]) -> None:
        self._ids = torch.tensor(sorted(weights))
        held = [weights[expert] for expert in sorted(weights)]
        self._gate_up_G2Fd = torch.stack([torch.cat((one.gate_Fd, one.up_Fd)).float() for one in held])
        self._down_GdF = torch.stack([one.down_dF.float() for one in held])
        _, num_outputs, num_inputs = self._gate_up_G2Fd.shape
        self._gemm = GROUPED_GEMM.choose(
            GemmCase(num_inputs=num_inputs, num_outputs=num_outputs, dtype=torch.float32, device="cpu")
        )

    def __call__(self, rows_Pd: Tensor, experts_P: Tensor) -> tuple[Tensor, int]:
        """As `Experts` does."""
        if not len(rows_Pd):
            return rows_Pd, 0
        order_P = experts_P.argsort(stable=True)
        counts_G = torch.bincount(torch.searchsorted(self._ids, experts_P), minlength=len(self._ids))
        gate, up = self._gemm.multiply(rows_Pd[order_P], self._gate_up_G2Fd, counts_G).chunk(2, -1)
        out_Pd = self._gemm.multiply(F.silu(gate).mul_(up), self._down_GdF, counts_G)
        return torch.empty_like(rows_Pd).index_copy_(0, order_P, out_Pd), int((counts_G > 0).sum())


class HeldExperts(Protocol):
    """What a mixture-of-experts layer asks of either form."""

    def __call__(self, rows_Pd: Tensor, experts_P: Tensor) -> tuple[Tensor, int]: ...


def make_experts(weights: Mapping[int, SwiGluWeights], numerics: Numerics) -> HeldExperts:
    """The form `numerics` asks for."""
    if numerics.invariant or numerics.int8_levels or not weights:
        return Experts(weights, numerics)
    return GroupedExperts(weights)
