"""Which arithmetic an engine runs: decided once at start-up by `probe.py`, then only read."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from seqmtp_serve.config import Kernels
from seqmtp_serve.model.device import CPU

ROW_TILE = 8  # rows per tile of an invariant product
COLUMN_TILE = 16  # output columns per tile of a batched product: floats in the widest CPU vector
QUERY_TILE = 4  # query rows per tile of invariant attention, whose products are never split among threads
FIXED_TILE = 32  # query rows of each product of attention where `fixed_tiles` holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """The arithmetic of one engine.

    `invariant`: a row's bits depend on its own inputs only, never on its neighbours. `int8_levels`: the largest
    activation code of the int8 layers, 0 for fp32 weights. `fixed_tiles`: products run in tiles of one shape, the slow
    form of invariance for machines whose GEMM rows differ with the row count. `kernels` are the backends asked for.
    `device` is where weights, cached rows and everything a pass computes lie. `product_dtype` is that of the weights,
    and of a product's operands, where they are not int8; sums, norms, attention and the gate are float32 all the same.
    """

    invariant: bool = True
    int8_levels: int = 0
    fixed_tiles: bool = False
    kernels: Kernels = field(default_factory=Kernels)
    device: torch.device = CPU
    product_dtype: torch.dtype = torch.float32
