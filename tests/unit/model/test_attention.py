"""Paged attention against the plain form, and its bits against themselves under every way to cut the work."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from seqmtp_serve.model.attention import Span, attend, attend_plain, plan_attention
from seqmtp_serve.model.config import LlamaConfig
from seqmtp_serve.model.numerics import Numerics
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


@pytest.mark.covers(22)
def test_rows_before_the_first_slot_do_not_exist() -> None:
    qkv, first = projections(TINY), 21
    out = run(TINY, qkv, [LEN], first_slot=first)
    assert torch.allclose(out[first:], plain(TINY, qkv, first)[first:], atol=2e-6)
