"""One product for all experts: rows sorted by expert, each group times its own weight.

    out[g's rows] = rows[g's rows] @ weight[g].T

Shapes: P rows sorted by group, G groups, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from seqmtp_serve.model.backends.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmCase:
    """What decides whether a kernel fits. `num_inputs` and `num_outputs` are of one group."""

    num_inputs: int
    num_outputs: int
    dtype: torch.dtype
    device: str


class GroupedGemm(Protocol):
    """`counts_G` says how many rows each group has; a group may have none."""

    @property
    def name(self) -> str: ...

    def unavailable(self) -> str: ...

    def refuses(self, case: GemmCase) -> str: ...

    def multiply(self, rows_PI: Tensor, weight_GOI: Tensor, counts_G: Tensor) -> Tensor: ...


class TorchLoop:
    """One product for each group that has rows."""

    name = "torch"

    def unavailable(self) -> str:
        return ""

    def refuses(self, case: GemmCase) -> str:
        return ""

    def multiply(self, rows_PI: Tensor, weight_GOI: Tensor, counts_G: Tensor) -> Tensor:
        groups = torch.split(rows_PI, counts_G.tolist())
        return torch.cat([rows @ weight.T for rows, weight in zip(groups, weight_GOI, strict=True)])


class TorchGrouped:
    """`torch.nn.functional.grouped_mm` (torch 2.10): documented for bfloat16 on compute capability 8.0 and above."""

    name = "torch-grouped"

    def unavailable(self) -> str:
        return "" if hasattr(torch.nn.functional, "grouped_mm") else "torch is older than 2.10"

    def refuses(self, case: GemmCase) -> str:
        if case.device == "cpu":
            return "" if case.dtype == torch.float32 else "on a CPU half precision is slower than the reference"
        if case.dtype != torch.bfloat16:
            return f"{case.dtype} is not bfloat16"
        if case.device == "cuda" and torch.cuda.get_device_capability() < (8, 0):
            return "the device is older than compute capability 8.0"
        if case.num_inputs % 8 or case.num_outputs % 8:
            return "rows must be aligned to 16 bytes"
        return ""

    def multiply(self, rows_PI: Tensor, weight_GOI: Tensor, counts_G: Tensor) -> Tensor:
        ends_G = counts_G.cumsum(0).int()
        out: Tensor = torch.nn.functional.grouped_mm(rows_PI, weight_GOI.transpose(1, 2), offs=ends_G)
        return out


GROUPED_GEMM: Registry[GroupedGemm] = Registry("grouped GEMM", (TorchGrouped(), TorchLoop()))
