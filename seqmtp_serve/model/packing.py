"""How the query rows of one sequence are laid out for attention, so that heads sharing keys are rows of one product.

Shapes: R rows of a sequence, H query heads, G key/value heads, M padded query rows of one G (>= R * H / G).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """R rows as [G, M, D]. Indices count from the sequence's first row; the last row is repeated as padding."""

    num_rows: int  # M
    row_M: Tensor  # the sequence's row behind each packed row
    pack_index: Tensor  # [G * M] <- heads of the projection, whose rows hold `row_heads` of them
    unpack_index: Tensor  # [R * H] <- packed rows


@lru_cache(maxsize=256)
def packing(num_rows: int, row_tile: int, *, groups: int, per_group: int, row_heads: int) -> Packing:
    """The layout of `num_rows` rows with M a multiple of `row_tile`. Every layer, pass and sequence shares it."""
    num_real = num_rows * per_group
    num_packed = -(-num_real // row_tile) * row_tile
    packed_M = torch.arange(num_packed).clamp_(max=num_real - 1)
    row_M = packed_M // per_group
    group_G1 = torch.arange(groups)[:, None]
    real_GR = (group_G1 * num_packed + torch.arange(num_real)).view(groups, num_rows, per_group)
    return Packing(
        num_rows=num_packed,
        row_M=row_M,
        pack_index=(row_M * row_heads + group_G1 * per_group + packed_M % per_group).flatten(),
        unpack_index=real_GR.transpose(0, 1).flatten(),
    )
