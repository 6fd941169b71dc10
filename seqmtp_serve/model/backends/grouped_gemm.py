"""One product for all experts of a process: rows sorted by expert, each group times its own weight.

    out[g's rows] = rows[g's rows] @ weight[g].T

Shapes: P rows sorted by group, G groups, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from seqmtp_serve.model.backends.registry import Registry
from seqmtp_serve.model.linear import Linear, make_linear
from seqmtp_serve.model.numerics import Numerics

GroupedProduct = Callable[[Tensor, Tensor], Tensor]  # rows [P, I], how many rows each group has [G] -> [P, O]
Stacked = Sequence[Tensor]  # one group's weights [O_k, I], stacked along O


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmCase:
    """What decides whether a kernel fits. `num_inputs` and `num_outputs` are of one group; the rows lie on `device`."""

    num_groups: int
    num_inputs: int
    num_outputs: int
    numerics: Numerics
    dtype: torch.dtype = torch.float32
    device: str = "cpu"


class GroupedGemm(Protocol):
    """`product` is built once from every group's weight; a group may have no rows."""

    @property
    def name(self) -> str: ...

    def unavailable(self) -> str: ...

    def refuses(self, case: GemmCase) -> str: ...

    def product(self, weights_G: Sequence[Stacked], case: GemmCase, *, fine: bool = False) -> GroupedProduct:
        """`fine`: as `make_linear` takes it."""
        ...


class TorchLoop:
    """One product for each group that has rows, in the form the numerics ask for: tiled for `invariant`, or int8."""

    name = "torch"

    def unavailable(self) -> str:
        return ""

    def refuses(self, case: GemmCase) -> str:
        return ""

    def product(self, weights_G: Sequence[Stacked], case: GemmCase, *, fine: bool = False) -> GroupedProduct:
        return _Loop([make_linear(weight, case.numerics, fine=fine) for weight in weights_G])


@dataclass(frozen=True, slots=True)
class _Loop:
    linears_G: Sequence[Linear]

    def __call__(self, rows_PI: Tensor, counts_G: Tensor) -> Tensor:
        parts, start = [], 0
        for linear, count in zip(self.linears_G, counts_G.tolist(), strict=True):
            if count:
                parts.append(linear(rows_PI[start : start + count]))
                start += count
        return torch.cat(parts)


class TorchGrouped:
    """`torch.nn.functional.grouped_mm` (torch 2.10): documented for bfloat16 on compute capability 8.0 and above."""

    name = "torch-grouped"

    def unavailable(self) -> str:
        return "" if hasattr(torch.nn.functional, "grouped_mm") else "torch is older than 2.10"

    def refuses(self, case: GemmCase) -> str:
        if not case.num_groups:
            return "no expert is held here"
        if case.numerics.invariant:
            return "a row's last bits depend on its batch, which invariant numerics forbid"
        if case.numerics.int8_levels:
            return "it has no int8 form"
        if case.device == "cpu":
            return "" if case.dtype == torch.float32 else "on a CPU half precision is slower than the reference"
        if case.dtype != torch.bfloat16:
            return f"{case.dtype} is not bfloat16"
        if case.device == "cuda" and torch.cuda.get_device_capability() < (8, 0):
            return "the device is older than compute capability 8.0"
        if case.num_inputs % 8 or case.num_outputs % 8:
            return "rows must be aligned to 16 bytes"
        return ""

    def product(self, weights_G: Sequence[Stacked], case: GemmCase, *, fine: bool = False) -> GroupedProduct:
        stacked_GOI = torch.stack([torch.cat(tuple(weight)).to(case.device, case.dtype) for weight in weights_G])
        return _Grouped(stacked_GOI.transpose(1, 2))


@dataclass(frozen=True, slots=True)
class _Grouped:
    weight_GIO: Tensor

    def __call__(self, rows_PI: Tensor, counts_G: Tensor) -> Tensor:
        ends_G = counts_G.cumsum(0).int()
        out_PO: Tensor = torch.nn.functional.grouped_mm(rows_PI, self.weight_GIO, offs=ends_G)
        return out_PO


GROUPED_GEMM: Registry[GroupedGemm] = Registry("grouped GEMM", (TorchGrouped(), TorchLoop()), setting="experts")
