"""What acts on single rows, computed alike whatever their neighbours under `INVARIANT`: products, elementwise, RMSNorm.

`MIXED` rounds both operands of a product to bf16, forward and backward, and sums in float32; everything between the
products, the gate and the weights that the optimizer moves stay float32 (arXiv 1710.03740).

Shapes: N rows, I inputs, O outputs, d size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqmtp_serve.model.numerics import ROW_TILE


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """How a trainer computes. `products`: what the operands of matrix products are rounded to."""

    invariant: bool = False
    products: torch.dtype = torch.float32


FAST = Arithmetic()
INVARIANT = Arithmetic(invariant=True)
MIXED = Arithmetic(products=torch.bfloat16)
_MIXED_ROWS = 32  # rows are padded to this: oneDNN compiles a kernel for each number of rows, experts meet any number
_ELEMENTWISE_TILE = 32  # rows: the floats of two AVX-512 registers, so that a row of any width makes whole tiles


class RowLinear(nn.Module):
    """`x @ W.T`. Under `INVARIANT` every product has exactly `ROW_TILE` rows: one shape, hence one order of summing."""

    def __init__(self, inputs: int, outputs: int, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self._arithmetic = arithmetic

    def forward(self, x_NI: Tensor) -> Tensor:
        return product(x_NI, self.weight, self._arithmetic)


def product(x_NI: Tensor, weight_OI: Tensor, arithmetic: Arithmetic) -> Tensor:
    """`[N, O]` in the dtype of `x_NI`; differentiable in both."""
    num_rows = len(x_NI)
    if arithmetic.products != torch.float32:
        rounded = F.pad(x_NI.to(arithmetic.products), (0, 0, 0, -num_rows % _MIXED_ROWS))
        return F.linear(rounded, weight_OI.to(arithmetic.products))[:num_rows].to(x_NI.dtype)
    if not arithmetic.invariant or num_rows == 0:
        return F.linear(x_NI, weight_OI)
    padded = F.pad(x_NI, (0, 0, 0, -num_rows % ROW_TILE))
    return torch.cat([F.linear(tile, weight_OI) for tile in torch.split(padded, ROW_TILE)])[:num_rows]


def each(function: Callable[[Tensor], Tensor], x_NI: Tensor, *, invariant: bool) -> Tensor:
    """An elementwise function. Torch ends a vectorised loop with scalar code of other bits: whole tiles have no end."""
    if not invariant:
        return function(x_NI)
    return function(F.pad(x_NI, (0, 0, 0, -len(x_NI) % _ELEMENTWISE_TILE)))[: len(x_NI)]


class RmsNorm(nn.Module):
    """`gain * x / sqrt(mean(x^2) + eps)` with a plain gain, over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x_Nd: Tensor) -> Tensor:
        return normalised(x_Nd, self.weight, self.eps)


def normalised(x_Nd: Tensor, gain_d: Tensor, eps: float) -> Tensor:
    """RMSNorm as a function of its gain."""
    return x_Nd * torch.rsqrt(x_Nd.square().mean(-1, keepdim=True) + eps) * gain_d
