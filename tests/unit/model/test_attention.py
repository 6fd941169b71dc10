"""Paged attention against the plain form, and its bits against themselves under every way to cut the work."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqmtp_serve.model.attention import Span, attend, attend_plain, attend_tiles, plan_attention
from seqmtp_serve.model.config import LlamaConfig
from seqmtp_serve.model.numerics import QUERY_TILE, Numerics
from seqmtp_serve.model.probe import attention_rows_agree
from seqmtp_serve.model.synthetic import TINY

PAGE = 16
LEN = 75  # rows of the sequence under test: five pages, the last one partly filled
NUMERICS = Numerics(fixed_tiles=not attention_rows_agree())
SMOLLM = replace(TINY, hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64)


def projections(config: LlamaConfig, num_rows: int = LEN, seed: int = 0) -> Tensor:
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))


def run(
    config: LlamaConfig,
    qkv: Tensor,
    cuts: list[int],
    *,
    pages: list[int] | None = None,
    first_slot: int = 0,
    numerics: Numerics = NUMERICS,
) -> Tensor:
    """Attend the rows of one sequence in pieces of `cuts` rows, over a pool full of old values."""
    pages = pages or list(range(3, 9))
    pool = torch.randn(16 * PAGE, 2 * config.kv_size, generator=torch.Generator().manual_seed(9))
    outputs, start = [], 0
    for num_rows in cuts:
        span = Span(pages=pages, start=start, num_rows=num_rows, first_slot=first_slot)
        plan = plan_attention([span], config, PAGE, numerics)
        outputs.append(attend(qkv[start : start + num_rows], pool, plan, config, PAGE))
        start += num_rows
    return torch.cat(outputs)


def plain(config: LlamaConfig, qkv: Tensor, first_slot: int = 0) -> Tensor:
    q, k, v = (
        part.unflatten(1, (-1, config.head_dim)).transpose(0, 1)
        for part in qkv.split([config.query_size, config.kv_size, config.kv_size], 1)
    )
    out = attend_plain(q, k, v, 0, first_slot)
    return out.transpose(0, 1).flatten(1).float()


@pytest.mark.parametrize("config", [TINY, SMOLLM], ids=["tiny", "smollm2"])
@pytest.mark.parametrize(
    "numerics",
    [Numerics(), Numerics(fixed_tiles=True), Numerics(invariant=False)],
    ids=["invariant", "fixed tiles", "fast"],
)
def test_it_is_attention(config: LlamaConfig, numerics: Numerics) -> None:
    qkv = projections(config)
    assert torch.allclose(run(config, qkv, [LEN], numerics=numerics), plain(config, qkv), atol=2e-6)


@pytest.mark.parametrize("config", [TINY, SMOLLM], ids=["tiny", "smollm2"])
@pytest.mark.parametrize(
    "cuts", [[1] * LEN, [2] * 37 + [1], [4] * 18 + [3], [16] * 4 + [11], [31, 33, 11], [64, 1, 4, 4, 2]], ids=str
)
@pytest.mark.parametrize("fixed_tiles", [not attention_rows_agree(), True], ids=["as probed", "fixed"])
def test_cutting_the_queries_changes_no_bit(config: LlamaConfig, cuts: list[int], fixed_tiles: bool) -> None:
    qkv, numerics = projections(config), Numerics(fixed_tiles=fixed_tiles)
    assert torch.equal(run(config, qkv, cuts, numerics=numerics), run(config, qkv, [LEN], numerics=numerics))


def test_scattered_pages_change_no_bit() -> None:
    qkv = projections(SMOLLM)
    scattered = [7, 2, 11, 10, 15, 0]
    assert torch.equal(run(SMOLLM, qkv, [40, 35], pages=scattered), run(SMOLLM, qkv, [LEN]))


def test_neighbours_change_no_bit() -> None:
    qkv, other = projections(SMOLLM), projections(SMOLLM, 20, seed=5)
    pool = torch.zeros(16 * PAGE, 2 * SMOLLM.kv_size)
    spans = [
        Span(pages=[9, 10], start=0, num_rows=20),
        Span(pages=list(range(8)), start=0, num_rows=LEN),
    ]
    both = attend(torch.cat((other, qkv)), pool, plan_attention(spans, SMOLLM, PAGE, NUMERICS), SMOLLM, PAGE)
    assert torch.equal(both[20:], run(SMOLLM, qkv, [LEN]))


def page_by_page(config: LlamaConfig, qkv: Tensor, pool: Tensor, spans: list[Span]) -> Tensor:
    """The plain form of what a plan does at once: each page of each span attended alone, then softmax over its pages.
    `pool` holds the rows of `qkv` already."""
    groups, dim = config.num_kv_heads, config.head_dim
    outputs, first = [], 0
    for span in spans:
        rows = qkv[first : first + span.num_rows, : config.query_size].view(span.num_rows, groups, -1, dim)
        first += span.num_rows
        queries = rows.transpose(0, 1).flatten(1, 2)  # [G, rows x group, D]
        padding = -queries.shape[1] % QUERY_TILE
        queries = torch.cat((queries, queries[:, -1:].expand(-1, padding, -1)), 1)[None]
        last_slot = span.start + torch.arange(queries.shape[2]) // config.num_query_groups
        last_slot.clamp_(max=span.start + span.num_rows - 1)
        partials, weights = [], []
        for tile in range((span.start + span.num_rows - 1) // PAGE + 1):
            page = pool.view(-1, PAGE, 2, groups, dim)[span.pages[tile]]
            keys, values = (page[:, half].transpose(0, 1)[None] for half in (0, 1))
            slots = torch.arange(tile * PAGE, (tile + 1) * PAGE)
            hidden = (slots > last_slot[:, None]) | (slots < span.first_slot)
            mask = torch.zeros(hidden.shape).masked_fill(hidden, -1e30)[None, None]
            out, lse = attend_tiles(queries, keys, values, mask, config.softmax_scale)
            partials.append(out[0])
            weights.append(F.pad(lse.flatten(), (0, -lse.numel() % 16)))
        weight = torch.softmax(torch.stack(weights), 0)[:, : lse.numel()].view(-1, groups, queries.shape[2], 1)
        mixed = (torch.stack(partials) * weight).sum(0)[:, : rows.shape[0] * rows.shape[2]]
        outputs.append(mixed.unflatten(1, (span.num_rows, -1)).transpose(0, 1).flatten(1))
    return torch.cat(outputs)


@pytest.mark.parametrize("config", [TINY, SMOLLM], ids=["tiny", "smollm2"])
@pytest.mark.skipif(NUMERICS.fixed_tiles, reason="query tiles of this machine have one size only")
def test_a_stack_of_spans_has_the_bits_of_page_by_page(config: LlamaConfig) -> None:
    """Short and long spans, of one page and of many, in order or scattered, in one plan."""
    spans = [
        Span(pages=[2, 3, 4], start=37, num_rows=1),
        Span(pages=[20, 21, 22, 23, 24, 25, 26, 27], start=3, num_rows=110),
        Span(pages=[9, 7, 30, 11, 6, 0], start=77, num_rows=4),
        Span(pages=[12], start=0, num_rows=2),
        Span(pages=[13, 14, 15, 16], start=47, num_rows=3, first_slot=20),
    ]
    qkv = projections(config, sum(span.num_rows for span in spans), seed=3)
    pool = torch.randn(32 * PAGE, 2 * config.kv_size, generator=torch.Generator().manual_seed(9))
    found = attend(qkv, pool, plan_attention(spans, config, PAGE, NUMERICS), config, PAGE)
    assert torch.equal(found, page_by_page(config, qkv, pool, spans))


def test_a_plan_serves_layer_after_layer() -> None:
    """Its working memory holds nothing of the layer before."""
    spans = [Span(pages=[4, 5], start=20, num_rows=2), Span(pages=[8], start=9, num_rows=1)]
    layers = [projections(SMOLLM, 3, seed=each) for each in (1, 2, 1)]
    pool = torch.randn(16 * PAGE, 2 * SMOLLM.kv_size, generator=torch.Generator().manual_seed(9))
    plan = plan_attention(spans, SMOLLM, PAGE, NUMERICS)
    first, second, again = (attend(qkv, pool, plan, SMOLLM, PAGE) for qkv in layers)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


@pytest.mark.covers(22)
def test_rows_before_the_first_slot_do_not_exist() -> None:
    qkv, first = projections(TINY), 21
    out = run(TINY, qkv, [LEN], first_slot=first)
    assert torch.allclose(out[first:], plain(TINY, qkv, first)[first:], atol=2e-6)
