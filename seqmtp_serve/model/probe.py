"""Find out at start-up what this machine's arithmetic guarantees, by trying it and not by reading CPU flags.

Two things are probed. (1) Whether int8 products accumulate exactly. CPUs without a four-way int8 dot product add pairs
of u8 x s8 products in int16, which saturates for full-range codes; there the activation codes are cut to 63 levels, the
widest range that cannot saturate (127 * 127 * 2 < 2**15). (2) Whether a row of a GEMM has the same bits in products of
different row counts, as long as these are multiples of `ROW_TILE`. If not, every product uses one fixed tile.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from seqmtp_serve.config import EngineConfig
from seqmtp_serve.model.linear import Int8Linear
from seqmtp_serve.model.numerics import ROW_TILE, Numerics

_ROW_COUNTS = (8, 16, 24, 40, 64, 256)


def probe(config: EngineConfig) -> Numerics:
    """The numerics `config` asks for, as this machine can give them. Takes a few milliseconds."""
    invariant = config.numerics == "invariant"
    return Numerics(
        invariant=invariant,
        int8_levels=int8_levels() if config.weights == "int8" else 0,
        fixed_tiles=invariant and not gemm_rows_agree(),
    )


def int8_levels() -> int:
    """127 if the worst-case int8 product is exact here, else 63."""
    num_inputs = 64
    out_O = Int8Linear(torch.ones(16, num_inputs), levels=127)(torch.ones(1, num_inputs))[0]
    return 127 if bool((out_O - num_inputs).abs().max() < 1e-3) else 63


def gemm_rows_agree(num_inputs: int = 192, num_outputs: int = 320) -> bool:
    """Whether the fp32 GEMM gives a row the same bits at every row count that is a multiple of `ROW_TILE`."""
    generator = torch.Generator().manual_seed(0)
    x_NI = torch.randn(max(_ROW_COUNTS), num_inputs, generator=generator)
    weight_OI = torch.randn(num_outputs, num_inputs, generator=generator)
    expected = F.linear(x_NI[:ROW_TILE], weight_OI)
    return all(torch.equal(F.linear(x_NI[:rows], weight_OI)[:ROW_TILE], expected) for rows in _ROW_COUNTS)
