"""Absorbed latent attention in torch: page by page, in fused calls over gathered rows, and as its plain definition.

Shapes: N rows of a pass, H heads, C latent size, E values of a cached row, S pool slots or cached rows, and in a fused
call B sequences of Q rows each, X = Q * H.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from seqmtp_serve.model.attention import AttentionPlan, Span, attend_cached, plan_attention

if TYPE_CHECKING:
    from seqmtp_serve.model.backends.latent_attention import LatentCase


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentHeads:
    """Absorbed attention as `attention.py` sees it: one key/value head, whose values lie inside its keys."""

    num_heads: int
    head_dim: int  # E
    softmax_scale: float
    num_kv_heads: int = 1
    value_offset: int = 0

    @property
    def row_heads(self) -> int:
        return self.num_heads

    @property
    def cache_row_size(self) -> int:
        return self.head_dim


class Paged:
    """The engine's own: each page by itself, so that a row's bits do not depend on its neighbours (`attention.py`)."""

    name = "paged"

    def unavailable(self) -> str:
        return ""

    def refuses(self, case: LatentCase) -> str:
        if case.device.type != "cpu" or case.dtype != torch.float32:
            return "it computes in float32 on a CPU"
        return ""

    def make(self, case: LatentCase) -> _PagedKernel:
        return _PagedKernel(case)


class _PagedKernel:
    def __init__(self, case: LatentCase) -> None:
        self._case = case
        size = case.latent_size + case.rope_size
        self._heads = LatentHeads(num_heads=case.num_heads, head_dim=size, softmax_scale=case.softmax_scale)

    def plan(self, spans: Sequence[Span]) -> _PagedPlan:
        case, heads = self._case, self._heads
        return _PagedPlan(plan_attention(spans, heads, case.page_size, case.numerics), heads, case)


@dataclass(frozen=True, slots=True)
class _PagedPlan:
    shared: AttentionPlan
    heads: LatentHeads
    case: LatentCase

    def attend(self, rows_NHE: Tensor, pool_SE: Tensor) -> Tensor:
        mixed = attend_cached(rows_NHE.flatten(1), pool_SE, self.shared, self.heads, self.case.page_size)
        return mixed.view(rows_NHE.shape)[..., : self.case.latent_size]


class Sdpa:
    """Spans of the same number of rows in one fused call, on any device. It gathers their cached rows first, so each is
    moved once more than a paged kernel moves it. All heads of a row are rows of one product, because they share their
    keys: torch would copy these for each head."""

    name = "sdpa"

    def unavailable(self) -> str:
        return ""

    def refuses(self, case: LatentCase) -> str:
        if case.numerics.invariant:
            return "a row's last bits depend on its batch, which invariant numerics forbid"
        if case.device.type == "cpu" and case.dtype != torch.float32:
            return "on a CPU half precision is slower than the reference"
        return ""

    def make(self, case: LatentCase) -> _SdpaKernel:
        return _SdpaKernel(case)


class _SdpaKernel:
    def __init__(self, case: LatentCase) -> None:
        self._case = case

    def plan(self, spans: Sequence[Span]) -> _SdpaPlan:
        by_rows: dict[int, list[tuple[int, Span]]] = {}
        for first_row, span in zip(_first_rows(spans), spans, strict=False):
            by_rows.setdefault(span.num_rows, []).append((first_row, span))
        return _SdpaPlan(tuple(self._call(num_rows, each) for num_rows, each in by_rows.items()), self._case)

    def _call(self, num_rows: int, spans: Sequence[tuple[int, Span]]) -> _FusedCall:
        size, device = self._case.page_size, self._case.device
        longest = max(span.start for _, span in spans) + num_rows
        num_pages = (longest - 1) // size + 1
        pages = [[*span.pages[:num_pages], *[0] * (num_pages - len(span.pages))] for _, span in spans]
        pages_BT = torch.tensor(pages, device=device)
        bounds = torch.tensor([(row, span.start, span.first_slot) for row, span in spans], device=device)
        first_row_B1, start_B1, first_slot_B1 = torch.split(bounds, 1, 1)
        rows_Q, slot_S = torch.arange(num_rows, device=device), torch.arange(longest, device=device)
        seen_BQS = slot_S <= (start_B1 + rows_Q)[:, :, None]
        seen_BQS &= slot_S >= first_slot_B1[:, :, None]
        # What nobody sees must be finite all the same, or 0 * NaN spoils the sum: the span's own last row is.
        last_B1 = start_B1 + (num_rows - 1)
        read_BS = torch.where((slot_S < first_slot_B1) | (slot_S > last_B1), last_B1, slot_S)
        return _FusedCall(
            rows_BQ=first_row_B1 + rows_Q,
            slots_BS=pages_BT.gather(1, read_BS // size) * size + read_BS % size,
            seen_B1XS=seen_BQS.repeat_interleave(self._case.num_heads, 1).unsqueeze(1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _FusedCall:
    rows_BQ: Tensor
    slots_BS: Tensor
    seen_B1XS: Tensor


@dataclass(frozen=True, slots=True)
class _SdpaPlan:
    calls: tuple[_FusedCall, ...]
    case: LatentCase

    def attend(self, rows_NHE: Tensor, pool_SE: Tensor) -> Tensor:
        case = self.case
        out_NHC = rows_NHE.new_empty(*rows_NHE.shape[:2], case.latent_size)
        for call in self.calls:
            cached_B1SE = pool_SE[call.slots_BS].unsqueeze(1)
            mixed_B1XC = F.scaled_dot_product_attention(
                rows_NHE[call.rows_BQ].flatten(1, 2).unsqueeze(1),
                cached_B1SE,
                cached_B1SE[..., : case.latent_size],
                call.seen_B1XS,
                scale=case.softmax_scale,
            )
            out_NHC[call.rows_BQ] = torch.unflatten(mixed_B1XC.squeeze(1), 1, (-1, rows_NHE.shape[1]))
        return out_NHC


class TorchReference:
    """One row after the other over exactly the cached rows it sees, in float32 (float64 for float64 rows): no product
    has another row in it, so the bits are a row's own by construction."""

    name = "torch"

    def unavailable(self) -> str:
        return ""

    def refuses(self, case: LatentCase) -> str:
        return ""

    def make(self, case: LatentCase) -> _ReferenceKernel:
        return _ReferenceKernel(case)


class _ReferenceKernel:
    def __init__(self, case: LatentCase) -> None:
        self._case = case

    def plan(self, spans: Sequence[Span]) -> _ReferencePlan:
        return _ReferencePlan(tuple(spans), self._case)


@dataclass(frozen=True, slots=True)
class _ReferencePlan:
    spans: tuple[Span, ...]
    case: LatentCase

    def attend(self, rows_NHE: Tensor, pool_SE: Tensor) -> Tensor:
        case = self.case
        wide = torch.float64 if rows_NHE.dtype == torch.float64 else torch.float32
        out_NHC = rows_NHE.new_empty(*rows_NHE.shape[:2], case.latent_size)
        for first_row, span in zip(_first_rows(self.spans), self.spans, strict=False):
            cached_SE = pool_SE[slots_of(span, case.page_size).to(pool_SE.device)].to(wide)
            for row in range(span.num_rows):
                slot = span.start + row
                seen_SE = cached_SE[min(span.first_slot, slot) : slot + 1]
                query_HE = rows_NHE[first_row + row].to(wide).clone()  # aligned like every other row
                weights_HS = (query_HE @ seen_SE.T * case.softmax_scale).softmax(-1)
                out_NHC[first_row + row] = (weights_HS @ seen_SE[:, : case.latent_size]).to(out_NHC.dtype)
        return out_NHC


def slots_of(span: Span, page_size: int) -> Tensor:
    """The pool slots of every row that the span's last row may see, in order: `[start + num_rows]`."""
    slot_S = torch.arange(span.start + span.num_rows)
    return torch.tensor(span.pages)[slot_S // page_size] * page_size + slot_S % page_size


def _first_rows(spans: Sequence[Span]) -> accumulate[int]:
    return accumulate((span.num_rows for span in spans), initial=0)
