"""One product for all experts of a process: rows sorted by expert, each group times its own weight.

    out[g's rows] = rows[g's rows] @ weight[g].T

Shapes: P rows sorted by group, G groups, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from seqmtp_serve.model.backends.registry import Registry
from seqmtp_serve.model.linear import Linear, make_linear
from seqmtp_serve.model.numerics import Numerics


@dataclass(slots=True)
class Groups:
    """Where the rows of each group end. Known where they were sorted; the host reads it once, if a product asks."""

    ends_G: Tensor
    _counts: list[int] | None = field(default=None, init=False)

    def counts(self) -> list[int]:
        """How many rows each has. On a GPU the host waits for everything before it."""
        if self._counts is None:
            ends = self.ends_G.tolist()
            self._counts = [stop - start for start, stop in zip([0, *ends], ends, strict=False)]
        return self._counts

    def num_used(self) -> Tensor | int:
        """How many have any; a number where that needs no waiting."""
        if self._counts is None and self.ends_G.device.type != "cpu":
            return (self.ends_G.diff(prepend=self.ends_G.new_zeros(1)) > 0).sum()
        return sum(map(bool, self.counts()))


GroupedProduct = Callable[[Tensor, Groups], Tensor]  # rows [P, I] -> [P, O]
Stacked = Sequence[Tensor]  # one group's weights [O_k, I], stacked along O


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmCase:
    """What decides whether a kernel fits. `num_inputs` and `num_outputs` are of one group, `dtype` of its operands."""

    num_groups: int
    num_inputs: int
    num_outputs: int
    numerics: Numerics
    dtype: torch.dtype = torch.float32

    @property
    def device(self) -> torch.device:
        """Where the rows lie."""
        return self.numerics.device


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

    def __call__(self, rows_PI: Tensor, groups: Groups) -> Tensor:
        parts, start = [], 0
        for linear, count in zip(self.linears_G, groups.counts(), strict=True):
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
        if case.device.type == "cpu":
            return "" if case.dtype == torch.float32 else "on a CPU half precision is slower than the reference"
        if case.dtype != torch.bfloat16:
            return f"{case.dtype} is not bfloat16"
        if case.device.type == "cuda" and torch.cuda.get_device_capability(case.device) < (8, 0):
            return "the device is older than compute capability 8.0"
        if case.num_inputs % 8 or case.num_outputs % 8:
            return "rows must be aligned to 16 bytes"
        return ""

    def product(self, weights_G: Sequence[Stacked], case: GemmCase, *, fine: bool = False) -> GroupedProduct:
        stacked_GOI = torch.stack([torch.cat(tuple(weight)).to(case.dtype) for weight in weights_G])
        return _Grouped(stacked_GOI.transpose(1, 2))


@dataclass(frozen=True, slots=True)
class _Grouped:
    weight_GIO: Tensor

    def __call__(self, rows_PI: Tensor, groups: Groups) -> Tensor:
        dtype = self.weight_GIO.dtype
        out_PO: Tensor = torch.nn.functional.grouped_mm(rows_PI.to(dtype), self.weight_GIO, offs=groups.ends_G.int())
        return out_PO.to(rows_PI.dtype)


GROUPED_GEMM: Registry[GroupedGemm] = Registry("grouped GEMM", (TorchGrouped(), TorchLoop()), setting="experts")
