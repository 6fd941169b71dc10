"""Find out at start-up what this machine's arithmetic guarantees, by trying it and not by reading CPU flags.

(1) Whether int8 products accumulate exactly. CPUs without a four-way int8 dot product add pairs of u8 x s8 products in
int16, which saturates for full-range codes; there the activation codes are cut to 63 levels, the widest range that
cannot saturate (127 * 127 * 2 < 2**15). (2) Whether a row of a GEMM, and a query row of attention, has the same bits in
products of different row counts, as long as these are multiples of the tile. If not, every product uses one fixed tile.
"""

from __future__ import annotations

from math import sqrt

import torch
import torch.nn.functional as F

from seqmtp_serve.config import EngineConfig
from seqmtp_serve.model.attention import attend_tiles
from seqmtp_serve.model.device import usable_device
from seqmtp_serve.model.linear import Int8Linear
from seqmtp_serve.model.numerics import COLUMN_TILE, QUERY_TILE, ROW_TILE, Numerics

_ROW_COUNTS = (8, 16, 24, 40, 64, 256)
_QUERY_ROWS = (4, 8, 12, 20, 24, 96, 192, 768)


def probe(config: EngineConfig) -> Numerics:
    """The numerics `config` asks for, as this machine can give them. Takes a few milliseconds.

    Raises InvalidField when there is no such device here.
    """
    invariant = config.numerics == "invariant"
    return Numerics(
        invariant=invariant,
        int8_levels=int8_levels() if config.weights == "int8" else 0,
        fixed_tiles=invariant and not (gemm_rows_agree() and attention_rows_agree()),
        kernels=config.kernels,
        device=usable_device(config.device),
        product_dtype=torch.bfloat16 if config.weights == "bf16" else torch.float32,
    )


def int8_levels() -> int:
    """127 if the worst-case int8 product is exact here, else 63."""
    num_inputs = 64
    out_O = Int8Linear(torch.ones(16, num_inputs), levels=127)(torch.ones(1, num_inputs))[0]
    return 127 if bool((out_O - num_inputs).abs().max() < 1e-3) else 63


def attention_rows_agree(page_size: int = 64, head_dim: int = 64) -> bool:
    """Whether attention inside a page gives a query row the same bits at every multiple of `QUERY_TILE` rows."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 3, page_size, head_dim, generator=generator).unbind(0)
    queries = torch.randn(1, 3, max(_QUERY_ROWS), head_dim, generator=generator)
    mask = torch.zeros(1, 1, max(_QUERY_ROWS), page_size)
    scale = 1.0 / sqrt(head_dim)
    expected = attend_tiles(queries[:, :, :QUERY_TILE], keys, values, mask[:, :, :QUERY_TILE], scale)
    for rows in _QUERY_ROWS:
        found = attend_tiles(queries[:, :, :rows], keys, values, mask[:, :, :rows], scale)
        if not all(torch.equal(each[:, :, :QUERY_TILE], want) for each, want in zip(found, expected, strict=True)):
            return False
    return True


def per_head_rows_agree(num_outputs: int, num_inputs: int = 32) -> bool:
    """Whether a batched product gives a row the same bits at every place and multiple of `ROW_TILE` rows.

    `num_outputs` is rounded up to a multiple of `COLUMN_TILE`.
    """
    generator = torch.Generator().manual_seed(0)
    x_HNI = torch.randn(3, max(_ROW_COUNTS), num_inputs, generator=generator)
    weight_HIO = torch.randn(3, num_inputs, -(-num_outputs // COLUMN_TILE) * COLUMN_TILE, generator=generator)
    expected = torch.bmm(x_HNI, weight_HIO)
    cuts = [(0, rows) for rows in _ROW_COUNTS] + [(start, start + ROW_TILE) for start in range(1, ROW_TILE)]
    return all(
        torch.equal(torch.bmm(x_HNI[:, start:stop].contiguous(), weight_HIO), expected[:, start:stop])
        for start, stop in cuts
    )


def gemm_rows_agree(num_inputs: int = 192, num_outputs: int = 320) -> bool:
    """Whether the fp32 GEMM gives a row the same bits at every row count that is a multiple of `ROW_TILE`."""
    generator = torch.Generator().manual_seed(0)
    x_NI = torch.randn(max(_ROW_COUNTS), num_inputs, generator=generator)
    weight_OI = torch.randn(num_outputs, num_inputs, generator=generator)
    expected = F.linear(x_NI[:ROW_TILE], weight_OI)
    return all(torch.equal(F.linear(x_NI[:rows], weight_OI)[:ROW_TILE], expected) for rows in _ROW_COUNTS)
