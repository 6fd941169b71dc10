"""The one projection of an MTP module, in the order its checkpoint declares (no shape reveals it)."""

from __future__ import annotations

import torch
from torch import Tensor

FUSION_ORDERS = ("he", "eh")


def projection_for_he(weight: Tensor, hidden_size: int, checkpoint_order: str) -> Tensor:
    """`eh_proj` [d, 2d] as a matrix for [hidden; embedding], from a checkpoint that declares `he` or `eh`.

    Only whole column blocks are exchanged, so applying it twice with `eh` gives the matrix back. Quantised storage
    must be dequantised first: its scales belong to the columns' old places. Raises ValueError for an undeclared order
    or another shape.
    """
    if checkpoint_order not in FUSION_ORDERS:
        raise ValueError("declare checkpoint fusion order: he or eh")
    if tuple(weight.shape) != (hidden_size, 2 * hidden_size):
        raise ValueError("fusion weight must have shape [d, 2d]")
    if checkpoint_order == "he":
        return weight
    return torch.cat((weight[:, hidden_size:], weight[:, :hidden_size]), dim=1)
