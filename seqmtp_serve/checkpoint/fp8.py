"""FP8 block storage of released DeepSeek checkpoints (DeepSeek-V3 `README_WEIGHTS.md`, `inference/kernel.py`).

`X.weight` is float8 e4m3 [N, K]; `X.weight_scale_inv` is float32 [ceil(N / a), ceil(K / b)] for blocks of a x b. The
name says inverse, the operation is a product: value = stored * scale of its block. Blocks at the lower and right edge
are cut short. Values are restored once, at load; how activations are quantised elsewhere (`activation_scheme`,
`scale_fmt`) does not matter here: they stay float32.

Shapes: N rows, K columns, n and k their numbers of blocks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqmtp_serve.errors import MtpIncomplete, TargetIncomplete

SCALE_SUFFIX = "_scale_inv"  # after the weight's own name
STORED_DTYPE = "F8_E4M3"
_RECORD = re.compile(r"fp8-e4m3-block\[(\d+),(\d+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """Blocks of `rows` x `columns` values share one scale."""

    rows: int
    columns: int

    def __str__(self) -> str:
        return f"fp8-e4m3-block[{self.rows},{self.columns}]"

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of a weight `[N, K]`: `[n, k]`."""
        num_rows, num_columns = shape
        return -(-num_rows // self.rows), -(-num_columns // self.columns)


def block_format(found: Any) -> BlockFormat:
    """From `quantization_config` of a `config.json`. Raises TargetIncomplete for any other way of storing weights."""
    if not isinstance(found, Mapping) or found.get("quant_method") != "fp8" or found.get("fmt", "e4m3") != "e4m3":
        method = found.get("quant_method") if isinstance(found, Mapping) else found
        raise TargetIncomplete(f"quantization_config: {method!r} is not supported, fp8 (e4m3, block scales) is")
    sizes = found.get("weight_block_size")
    if not (isinstance(sizes, list) and len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)):
        raise TargetIncomplete(f"quantization_config: weight_block_size {sizes!r} must be two block sizes")
    return BlockFormat(rows=sizes[0], columns=sizes[1])


def format_of_record(record: str) -> BlockFormat | None:
    """The format that a manifest's `quantization` names; None for "none". Raises MtpIncomplete for anything else."""
    if record == "none":
        return None
    found = _RECORD.fullmatch(record)
    if found is None or "0" in found.groups():
        raise MtpIncomplete(f"quantization: declares {record!r}; none and fp8-e4m3-block[rows,columns] are read")
    return BlockFormat(rows=int(found[1]), columns=int(found[2]))


def dequantise(stored_NK: Tensor, scale_nk: Tensor, blocks: BlockFormat) -> Tensor:
    """float32 `[N, K]`: each stored value times its block's scale, in one temporary of the result's size."""
    num_rows, num_columns = stored_NK.shape
    value_NK = stored_NK.clone() if stored_NK.dtype == torch.float32 else stored_NK.float()
    scale_Nk = scale_nk.repeat_interleave(blocks.rows, 0)[:num_rows]
    whole = num_columns // blocks.columns * blocks.columns
    for first, last in ((0, whole), (whole, num_columns)):  # the blocks that are whole, then the edge
        if last > first:
            part_Nkb = value_NK[:, first:last].view(num_rows, -1, min(blocks.columns, last - first))
            part_Nkb.mul_(scale_Nk[:, first // blocks.columns : -(-last // blocks.columns), None])
    return value_NK


def dequantise_by_block(stored_NK: Tensor, scale_nk: Tensor, blocks: BlockFormat) -> Tensor:
    """The same, one block after the other: the definition, for comparison."""
    value_NK = torch.empty(stored_NK.shape)
    for i, row in enumerate(range(0, stored_NK.shape[0], blocks.rows)):
        for j, column in enumerate(range(0, stored_NK.shape[1], blocks.columns)):
            block = (slice(row, row + blocks.rows), slice(column, column + blocks.columns))
            value_NK[block] = stored_NK[block].float() * scale_nk[i, j]
    return value_NK


def quantise(value_NK: Tensor, blocks: BlockFormat) -> tuple[Tensor, Tensor]:
    """Stored values and scales of a float matrix, as the released checkpoints were made: scale = amax / 448.

    A block of zeros gets the scale 1.
    """
    num_rows, num_columns = value_NK.shape
    scale_nk = torch.ones(blocks.scale_shape((num_rows, num_columns)))
    stored_NK = torch.empty(value_NK.shape, dtype=torch.float8_e4m3fn)
    for i, row in enumerate(range(0, num_rows, blocks.rows)):
        for j, column in enumerate(range(0, num_columns, blocks.columns)):
            block = (slice(row, row + blocks.rows), slice(column, column + blocks.columns))
            largest = value_NK[block].abs().max()
            if largest > 0:
                scale_nk[i, j] = largest / torch.finfo(torch.float8_e4m3fn).max
            stored_NK[block] = (value_NK[block].float() / scale_nk[i, j]).to(torch.float8_e4m3fn)
    return stored_NK, scale_nk
