"""Causal attention over paged keys and values, with the same bits for any batch, query split and padded length.

A page is one tile. Each (sequence, page) pair is attended alone, always with the same inner shapes, and gives a partial
output with its log-sum-exp; a sequence's partials are combined by softmax weights over its pages, in page order, where
a page beyond the causal limit weighs exactly zero. Query rows of one key/value head (rows x group) are padded to
`QUERY_TILE`. Only page count and row count vary from call to call, and neither enters a sum that another row sees.

Consecutive pages are a view of the pool; others are gathered first (same values, so same bits).

Shapes: N rows of the pass, R rows of one sequence, H query heads, G key/value heads, S pool slots, P page size,
T pages of one sequence, M padded query rows of one G (>= R * H / G), D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from seqmtp_serve.model.config import LlamaConfig
from seqmtp_serve.model.kernels import flash_attention
from seqmtp_serve.model.numerics import FIXED_TILE, QUERY_TILE, Numerics

_HIDDEN = -1e30  # not -inf: the log-sum-exp of a page that a row sees nothing of must come out as "weighs nothing"

_VECTOR = 16  # floats in the widest CPU vector


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
class _SpanPlan:
    num_tiles: int
    num_query_rows: int  # M
    query_offset: int  # first row of this span in the packed queries, which has G * M of them
    first_page: int  # -1: pages are not consecutive
    page_index_T: Tensor | None
    mask_T1MP: Tensor  # additive: 0 or `_HIDDEN`


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Everything about a pass that all its layers share. Built once a pass."""

    write_slot_N: Tensor  # where each row's key and value go in the pool
    pack_index: Tensor  # packed query rows <- rows of the fused projection seen as [N * (H + 2G), D]
    unpack_index: Tensor  # [N * H] <- packed rows
    spans: tuple[_SpanPlan, ...]
    rows_at_once: int  # query rows of one product: 0 for all, else a divisor of every M


def plan_attention(spans: Sequence[Span], config: LlamaConfig, page_size: int, numerics: Numerics) -> AttentionPlan:
    """Lay the pass out: rows in span order, each span's queries packed as [G, M, D]."""
    groups, per_group = config.num_kv_heads, config.num_query_groups
    heads = config.num_heads + 2 * groups
    row_tile = FIXED_TILE if numerics.fixed_tiles else QUERY_TILE if numerics.invariant else 1
    write, pack, unpack, plans = [], [], [], []
    first_row = query_offset = 0
    for span in spans:
        rows = torch.arange(span.num_rows)
        slots = rows + span.start
        num_tiles = (span.start + span.num_rows - 1) // page_size + 1
        pages = torch.tensor(span.pages[:num_tiles])
        write.append(pages[slots // page_size] * page_size + slots % page_size)

        num_real = span.num_rows * per_group
        num_packed = -(-num_real // row_tile) * row_tile
        packed_row = torch.arange(num_packed).clamp_(max=num_real - 1) // per_group  # padding repeats the last row
        packed_head = torch.arange(num_packed) % per_group
        group_G1 = torch.arange(groups)[:, None]
        pack.append(((first_row + packed_row) * heads + group_G1 * per_group + packed_head).flatten())
        unpack.append(
            query_offset
            + (group_G1 * num_packed + torch.arange(num_real)).view(groups, span.num_rows, per_group).transpose(0, 1)
        )

        slot_TP = torch.arange(num_tiles * page_size).view(num_tiles, 1, page_size)
        last_slot_M1 = slots[packed_row][:, None]
        hidden = slot_TP > last_slot_M1
        if span.first_slot:
            hidden |= slot_TP < span.first_slot
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, _HIDDEN)
        consecutive = span.pages[num_tiles - 1] - span.pages[0] == num_tiles - 1 and all(
            after - before == 1 for before, after in zip(span.pages, span.pages[1:num_tiles], strict=False)
        )
        plans.append(
            _SpanPlan(
                num_tiles=num_tiles,
                num_query_rows=num_packed,
                query_offset=query_offset,
                first_page=span.pages[0] if consecutive else -1,
                page_index_T=None if consecutive else pages,
                mask_T1MP=mask[:, None],
            )
        )
        first_row += span.num_rows
        query_offset += groups * num_packed
    return AttentionPlan(
        write_slot_N=torch.cat(write),
        pack_index=torch.cat(pack),
        unpack_index=torch.cat([index.flatten() for index in unpack]),
        spans=tuple(plans),
        rows_at_once=FIXED_TILE if numerics.fixed_tiles else 0,
    )


def attend(qkv_NE: Tensor, pool_SE: Tensor, plan: AttentionPlan, config: LlamaConfig, page_size: int) -> Tensor:
    """Write the rows' keys and values to the pool, then attend. Returns `[N, H * D]`.

    `qkv_NE` is the fused projection, rotated: `[N, (H + 2G) * D]`. `pool_SE` is one layer's `[S, 2 * G * D]`, keys
    first; it must hold finite values everywhere, because masked slots are multiplied by zero.
    """
    groups, dim = config.num_kv_heads, config.head_dim
    pool_SE.index_copy_(0, plan.write_slot_N, qkv_NE[:, config.query_size :])
    queries = qkv_NE.view(-1, dim).index_select(0, plan.pack_index)
    base, width = pool_SE.storage_offset(), 2 * groups * dim
    outputs = []
    for span in plan.spans:
        tiles, rows = span.num_tiles, span.num_query_rows
        if span.page_index_T is None:
            pages, offset = pool_SE, base + span.first_page * page_size * width
        else:
            pages, offset = pool_SE.view(-1, page_size * width).index_select(0, span.page_index_T), 0
        size, stride = (tiles, groups, page_size, dim), (page_size * width, dim, width, 1)
        keys_TGPD = pages.as_strided(size, stride, offset)
        values_TGPD = pages.as_strided(size, stride, offset + groups * dim)
        queries_TGMD = queries.as_strided((tiles, groups, rows, dim), (0, rows * dim, dim, 1), span.query_offset * dim)
        if not plan.rows_at_once:
            out_TGMD, lse_TGM = attend_tiles(queries_TGMD, keys_TGPD, values_TGPD, span.mask_T1MP)
        else:
            cut = [torch.split(each, plan.rows_at_once, 2) for each in (queries_TGMD, span.mask_T1MP)]
            parts = [attend_tiles(q, keys_TGPD, values_TGPD, mask) for q, mask in zip(*cut, strict=True)]
            out_TGMD, lse_TGM = (torch.cat(each, 2) for each in zip(*parts, strict=True))
        out_GMD = out_TGMD.mul_(_tile_weights(lse_TGM)).sum(0) if tiles > 1 else out_TGMD[0]
        outputs.append(out_GMD.view(-1, dim))
    packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return packed.index_select(0, plan.unpack_index).view(-1, config.query_size)


def attend_tiles(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Attention inside each tile: output `[T, G, M, D]` and log-sum-exp `[T, G, M]` (huge and negative: all masked)."""
    if q.device.type == "cpu":
        return flash_attention(q, k, v, mask)
    scores = torch.matmul(q, k.transpose(-1, -2)).mul_(q.shape[-1] ** -0.5).add_(mask)
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse.unsqueeze(-1)) @ v, lse


def _tile_weights(lse_TGM: Tensor) -> Tensor:
    """Softmax over tiles, `[T, G, M, 1]`. Padded to whole vectors: the last, partial one would use another exp."""
    tiles, groups, rows = lse_TGM.shape
    lse_TX = lse_TGM.transpose(1, 2).reshape(tiles, rows * groups)  # the kernel's own layout: a view
    padding = -(rows * groups) % _VECTOR
    weight_TX: Tensor = torch.softmax(F.pad(lse_TX, (0, padding)) if padding else lse_TX, 0)
    return weight_TX[:, : rows * groups].reshape(tiles, rows, groups, 1).transpose(1, 2)


def attend_plain(q_HRD: Tensor, k_GSD: Tensor, v_GSD: Tensor, start: int, first_slot: int = 0) -> Tensor:
    """The oracle: row r of one sequence sees slots `first_slot .. start + r`. Float64; returns `[H, R, D]`."""
    per_group = q_HRD.shape[0] // k_GSD.shape[0]
    keys = k_GSD.double().repeat_interleave(per_group, 0)
    values = v_GSD.double().repeat_interleave(per_group, 0)
    scores = q_HRD.double() @ keys.transpose(-1, -2) * q_HRD.shape[-1] ** -0.5
    slot, row = torch.arange(scores.shape[-1]), torch.arange(scores.shape[-2])[:, None]
    scores.masked_fill_((slot > row + start) | (slot < first_slot), float("-inf"))
    return torch.softmax(scores, -1) @ values
