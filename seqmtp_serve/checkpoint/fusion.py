"""The one projection of an MTP module, in the order its checkpoint declares (no shape reveals it)."""

from __future__ import annotations

import torch
from torch import Tensor

from seqmtp_serve.checkpoint.fp8 import BlockFormat

FUSION_ORDERS = ("he", "eh")


def projection_for_he(weight: Tensor, hidden_size: int, checkpoint_order: str) -> Tensor:
    """`eh_proj` [d, 2d] as a matrix for [hidden; embedding], from a checkpoint that declares `he` or `eh`.

    Only whole column blocks are exchanged, so applying it twice with `eh` gives the matrix back. Quantised storage
    must be dequantised first, or its scales exchanged with it (`swapped_scales`). Raises ValueError for an undeclared
    order or another shape.
    """
    if checkpoint_order not in FUSION_ORDERS:
        raise ValueError("declare checkpoint fusion order: he or eh")
    if tuple(weight.shape) != (hidden_size, 2 * hidden_size):
        raise ValueError("fusion weight must have shape [d, 2d]")
    if checkpoint_order == "he":
        return weight
    return swapped_halves(weight)


def swapped_halves(matrix: Tensor) -> Tensor:
    """The right half of the columns, then the left."""
    middle = matrix.shape[1] // 2
    return torch.cat((matrix[:, middle:], matrix[:, :middle]), dim=1)


def swapped_scales(scale_nk: Tensor, hidden_size: int, blocks: BlockFormat) -> Tensor:
    """The scales of a block-scaled `eh_proj` whose stored halves were exchanged: their columns of blocks go along.

    Raises ValueError when a block holds columns of both halves: its one scale has no place then, dequantise first.
    """
    if hidden_size % blocks.columns:
        raise ValueError(f"a scale covers columns of both halves: {blocks.columns} does not divide {hidden_size}")
    return swapped_halves(scale_nk)
