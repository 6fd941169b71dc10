"""The naive form of latent attention as a kernel: every head's keys and values of one span are made, then attended.

Shapes: H heads, R rows of the span, S cached rows, e query and key size of a head, v its value size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from seqmtp_serve.model.backends.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCase:
    """What decides whether a kernel fits."""

    query_head_dim: int
    value_head_dim: int
    dtype: torch.dtype = torch.float32
    device: str = "cpu"


class PrefillBackend(Protocol):
    """`attend` returns `[H, R, v]` in the dtype of the queries; row r sees the cached rows of `seen_RS[r]`."""

    @property
    def name(self) -> str: ...

    def unavailable(self) -> str: ...

    def refuses(self, case: PrefillCase) -> str: ...

    def attend(
        self, query_HRe: Tensor, keys_HSe: Tensor, values_HSv: Tensor, seen_RS: Tensor, scale: float
    ) -> Tensor: ...


class PrefillSdpa:
    """torch's fused attention."""

    name = "sdpa"

    def unavailable(self) -> str:
        return ""

    def refuses(self, case: PrefillCase) -> str:
        if case.device == "cpu" and case.dtype != torch.float32:
            return "on a CPU half precision is slower than the reference"
        return ""

    def attend(self, query_HRe: Tensor, keys_HSe: Tensor, values_HSv: Tensor, seen_RS: Tensor, scale: float) -> Tensor:
        return F.scaled_dot_product_attention(query_HRe, keys_HSe, values_HSv, seen_RS, scale=scale)


class PrefillReference:
    """Its definition, in float32 (float64 for float64 queries)."""

    name = "torch"

    def unavailable(self) -> str:
        return ""

    def refuses(self, case: PrefillCase) -> str:
        return ""

    def attend(self, query_HRe: Tensor, keys_HSe: Tensor, values_HSv: Tensor, seen_RS: Tensor, scale: float) -> Tensor:
        wide = torch.float64 if query_HRe.dtype == torch.float64 else torch.float32
        scores_HRS = query_HRe.to(wide) @ keys_HSe.to(wide).transpose(1, 2) * scale
        weights_HRS = scores_HRS.masked_fill(~seen_RS, float("-inf")).softmax(-1)
        return (weights_HRS @ values_HSv.to(wide)).to(query_HRe.dtype)


LATENT_PREFILL: Registry[PrefillBackend] = Registry(
    "latent prefill", (PrefillSdpa(), PrefillReference()), setting="prefill"
)
