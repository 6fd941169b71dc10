"""Causal attention over paged keys and values, with the same bits for any batch, query split and padded length.

A page is one tile. Each (sequence, page) pair is attended alone, always with the same inner shapes, and gives a partial
output with its log-sum-exp; a sequence's partials are combined by softmax weights over its pages, in page order, where
a page beyond the causal limit weighs exactly zero. Query rows of one key/value head (rows x group) are padded to
`QUERY_TILE`. Only page count and row count vary from call to call, and neither enters a sum that another row sees.

Consecutive pages are a view of the pool; others are gathered first (same values, so same bits). What needs no keys is
done for all short spans of a pass at once, in working memory that the plan holds for all layers.

Shapes: N rows of the pass, R rows of one sequence, H query heads, G key/value heads, S pool slots, P page size,
T pages of one sequence, M padded query rows of one G (>= R * H / G), X packed query rows of many (G, M), D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import gcd
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from seqmtp_serve.model.kernels import flash_attention
from seqmtp_serve.model.numerics import FIXED_TILE, QUERY_TILE, Numerics
from seqmtp_serve.model.packing import Packing, packing

_HIDDEN = -1e30  # not -inf: the log-sum-exp of a page that a row sees nothing of must come out as "weighs nothing"

_VECTOR = 16  # floats in the widest CPU vector

_SHORT = 64  # query rows of one G up to which a span's partial outputs are copied to combine them with others'


class Heads(Protocol):
    """What attention needs to know of a model. A cached row is keys `[G, D]` and, from `value_offset` on, values
    `[G, D]`; the two may overlap. `row_heads` counts the heads side by side in a row of the projection that holds the
    queries: they come first."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def row_heads(self) -> int: ...
    @property
    def cache_row_size(self) -> int: ...
    @property
    def value_offset(self) -> int: ...
    @property
    def softmax_scale(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive rows of one sequence in a pass.

    Row r is written to slot `start + r` and sees slots `first_slot .. start + r` of the sequence, whose slot s lies in
    `pages[s // P]`.
    """

    pages: Sequence[int]
    start: int
    num_rows: int
    first_slot: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """Query rows of one span that one product attends with, and where its partial results go."""

    queries_TGMD: Tensor
    mask_T1MP: Tensor  # additive: 0 or `_HIDDEN`
    lse_TGM: Tensor
    out_TGMD: Tensor | None  # None: the product's own memory will do


@dataclass(frozen=True, slots=True, kw_only=True)
class _SpanPlan:
    num_tiles: int
    first_page: int  # -1: pages are not consecutive
    page_index_T: Tensor | None
    products: tuple[_Product, ...]  # one, unless tiles are fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stack:
    """Spans whose tiles are combined together. A span of fewer tiles than the longest has some that weigh nothing.

    A stack of one product is `[T, G, M, D]`, any other `[T, X, D]`. `lse_TX` and its softmax `weight_TX` are padded to
    whole vectors: the last, partial one would use another exp.
    """

    spans: tuple[_SpanPlan, ...]
    lse_TX: Tensor
    weight_TX: Tensor
    weights: Tensor  # `weight_TX` without padding, one for each row of `partial`
    partial: Tensor | None  # None: the memory of the only product
    combined: Tensor  # a part of the plan's `packed_XD`


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Everything about a pass that all its layers share, working memory included. Built once a pass."""

    write_slot_N: Tensor  # where each row's key and value go in the pool
    pack_index_X: Tensor  # packed query rows <- rows of the projection seen as [N * row_heads, D]
    unpack_index: Tensor  # [N * H] <- packed rows
    queries_XD: Tensor
    packed_XD: Tensor
    stacks: tuple[_Stack, ...]


def plan_attention(spans: Sequence[Span], config: Heads, page_size: int, numerics: Numerics) -> AttentionPlan:
    """Lay the pass out: short spans first, as one stack, then each long one as a stack of its own."""
    groups, heads = config.num_kv_heads, config.row_heads
    per_group = config.num_heads // groups
    row_tile = FIXED_TILE if numerics.fixed_tiles else _query_tile(config.head_dim) if numerics.invariant else 1
    shapes = [packing(span.num_rows, row_tile, groups=groups, per_group=per_group, row_heads=heads) for span in spans]
    short = [which for which, shape in enumerate(shapes) if shape.num_rows <= _SHORT]
    stacked = [short] if short else []
    stacked += [[which] for which, shape in enumerate(shapes) if shape.num_rows > _SHORT]
    order = [which for members in stacked for which in members]
    num_packed = groups * sum(shape.num_rows for shape in shapes)
    device = numerics.device
    queries_XD, packed_XD = torch.empty(2, num_packed, config.head_dim, device=device).unbind(0)
    stacks, offsets, stop = [], dict[int, int](), 0
    for members in stacked:
        start = stop
        for which in members:
            offsets[which], stop = stop, stop + groups * shapes[which].num_rows
        parts = [_Part(spans[which], shapes[which], page_size) for which in members]
        stacks.append(_stack(parts, queries_XD[start:stop], packed_XD[start:stop], groups, numerics.fixed_tiles))
    first_row = list(accumulate((span.num_rows for span in spans), initial=0))
    pack_index_X = torch.cat([shapes[which].pack_index + first_row[which] * heads for which in order])
    unpack_index = torch.cat([shape.unpack_index + offsets[which] for which, shape in enumerate(shapes)])
    return AttentionPlan(
        write_slot_N=torch.tensor([slot for span in spans for slot in _pool_slots(span, page_size)], device=device),
        pack_index_X=pack_index_X.to(device),
        unpack_index=unpack_index.to(device),
        queries_XD=queries_XD,
        packed_XD=packed_XD,
        stacks=tuple(stacks),
    )


def _query_tile(head_dim: int) -> int:
    """Query rows of a tile: its outputs must fill whole blocks of the sum over pages, which adds what lies beyond its
    last block of four vectors in another order."""
    return max(QUERY_TILE, 4 * _VECTOR // gcd(head_dim, 4 * _VECTOR))


class _Part(NamedTuple):
    span: Span
    shape: Packing
    page_size: int

    @property
    def num_tiles(self) -> int:
        return (self.span.start + self.span.num_rows - 1) // self.page_size + 1

    @property
    def is_consecutive(self) -> bool:
        pages = self.span.pages[: self.num_tiles]
        return all(after - before == 1 for before, after in pairwise(pages))

    def mask(self, device: torch.device) -> Tensor:
        """`[T, 1, M, P]`"""
        slot_TP = torch.arange(self.num_tiles * self.page_size, device=device).view(self.num_tiles, 1, self.page_size)
        hidden = slot_TP > (self.shape.row_M.to(device) + self.span.start)[:, None]
        if self.span.first_slot:
            hidden |= slot_TP < self.span.first_slot
        return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, _HIDDEN)[:, None]


def _pool_slots(span: Span, page_size: int) -> Iterator[int]:
    for slot in range(span.start, span.start + span.num_rows):
        yield span.pages[slot // page_size] * page_size + slot % page_size


def _stack(parts: Sequence[_Part], queries_XD: Tensor, packed_XD: Tensor, groups: int, fixed_tiles: bool) -> _Stack:
    num_tiles, (num_rows, dim) = max(part.num_tiles for part in parts), packed_XD.shape
    device = packed_XD.device
    is_single = len(parts) == 1 and not fixed_tiles
    lse_TX = torch.full((num_tiles, num_rows + -num_rows % _VECTOR), _HIDDEN, device=device)
    weight_TX = torch.empty_like(lse_TX)
    partial_TXD = torch.zeros(num_tiles, num_rows, 0 if is_single else dim, device=device)
    spans, stop = [], 0
    for part in parts:
        tiles, rows = part.num_tiles, part.shape.num_rows
        start, stop = stop, stop + groups * rows
        lse_TGM = lse_TX[:tiles, start:stop].view(tiles, groups, rows)
        out_TGMD = partial_TXD[:tiles, start:stop].view(tiles, groups, rows, -1)
        queries_TGMD = queries_XD[start:stop].view(groups, rows, dim).expand(tiles, -1, -1, -1)
        mask_T1MP = part.mask(device)
        step = FIXED_TILE if fixed_tiles else rows
        cuts = [slice(row, row + step) for row in range(0, rows, step)]
        products = [
            _Product(
                queries_TGMD=queries_TGMD[:, :, cut],
                mask_T1MP=mask_T1MP[:, :, cut],
                lse_TGM=lse_TGM[:, :, cut],
                out_TGMD=None if is_single else out_TGMD[:, :, cut],
            )
            for cut in cuts
        ]
        pages = part.span.pages
        spans.append(
            _SpanPlan(
                num_tiles=tiles,
                first_page=pages[0] if part.is_consecutive else -1,
                page_index_T=None if part.is_consecutive else torch.tensor(pages[:tiles], device=device),
                products=tuple(products),
            )
        )
    grouped = (groups, -1) if is_single else (num_rows,)
    return _Stack(
        spans=tuple(spans),
        lse_TX=lse_TX,
        weight_TX=weight_TX,
        weights=weight_TX[:, :num_rows].view(num_tiles, *grouped, 1),
        partial=None if is_single else partial_TXD,
        combined=packed_XD.view(*grouped, dim),
    )


def attend(qkv_NE: Tensor, pool_SE: Tensor, plan: AttentionPlan, config: Heads, page_size: int) -> Tensor:
    """Write the rows' keys and values to the pool, then attend. Returns `[N, H * D]`.

    `qkv_NE` is the fused projection, rotated: `[N, (H + 2G) * D]`. `pool_SE` is one layer's `[S, 2 * G * D]`, keys
    first; it must hold finite values everywhere, because masked slots are multiplied by zero.
    """
    pool_SE.index_copy_(0, plan.write_slot_N, qkv_NE[:, config.num_heads * config.head_dim :])
    return attend_cached(qkv_NE, pool_SE, plan, config, page_size)


def attend_cached(rows_NE: Tensor, pool_SE: Tensor, plan: AttentionPlan, config: Heads, page_size: int) -> Tensor:
    """Attend to what the pool holds, the rows' own keys and values included. `rows_NE` is `[N, row_heads * D]`."""
    groups, dim, width, scale = config.num_kv_heads, config.head_dim, config.cache_row_size, config.softmax_scale
    torch.index_select(rows_NE.view(-1, dim), 0, plan.pack_index_X, out=plan.queries_XD)
    for stack in plan.stacks:
        partial = stack.partial
        for span in stack.spans:
            pages = _pages(pool_SE, span, page_size)
            size, stride = (span.num_tiles, groups, page_size, dim), (page_size * width, dim, width, 1)
            keys_TGPD = pages.as_strided(size, stride)
            values_TGPD = pages.as_strided(size, stride, pages.storage_offset() + config.value_offset)
            for product in span.products:
                out_TGMD, lse_TGM = attend_tiles(product.queries_TGMD, keys_TGPD, values_TGPD, product.mask_T1MP, scale)
                product.lse_TGM.copy_(lse_TGM)
                if product.out_TGMD is None:
                    partial = out_TGMD
                else:
                    product.out_TGMD.copy_(out_TGMD)
        assert partial is not None
        torch.softmax(stack.lse_TX, 0, out=stack.weight_TX)
        torch.sum(partial.mul_(stack.weights), 0, out=stack.combined)
    return plan.packed_XD.index_select(0, plan.unpack_index).view(-1, config.num_heads * dim)


def _pages(pool_SE: Tensor, span: _SpanPlan, page_size: int) -> Tensor:
    """The rows of a span's pages, `[T * P, E]`, on their way into the cache."""
    if span.page_index_T is not None:
        return pool_SE.view(-1, page_size * pool_SE.shape[1]).index_select(0, span.page_index_T)
    start = span.first_page * page_size
    pages = pool_SE[start : start + span.num_tiles * page_size]
    if pages.device.type == "cpu":
        pages.sum()  # read in order once: the product's own order defeats the prefetcher, and costs half as much again
    return pages


def attend_tiles(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention inside each tile: output `[T, G, M, D]` and log-sum-exp `[T, G, M]` (huge and negative: all masked)."""
    if q.device.type == "cpu":
        return flash_attention(q, k, v, mask, scale)
    scores = torch.matmul(q, k.transpose(-1, -2)).mul_(scale).add_(mask)
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse.unsqueeze(-1)) @ v, lse


def attend_plain(q_HRD: Tensor, k_GSD: Tensor, v_GSD: Tensor, start: int, first_slot: int = 0) -> Tensor:
    """The oracle: row r of one sequence sees slots `first_slot .. start + r`. Float64; returns `[H, R, D]`."""
    per_group = q_HRD.shape[0] // k_GSD.shape[0]
    keys = k_GSD.double().repeat_interleave(per_group, 0)
    values = v_GSD.double().repeat_interleave(per_group, 0)
    scores = q_HRD.double() @ keys.transpose(-1, -2) * q_HRD.shape[-1] ** -0.5
    slot, row = torch.arange(scores.shape[-1]), torch.arange(scores.shape[-2])[:, None]
    scores.masked_fill_((slot > row + start) | (slot < first_slot), float("-inf"))
    return torch.softmax(scores, -1) @ values
