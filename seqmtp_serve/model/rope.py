"""Rotary positions as one complex product.

The `rotate_half` convention of Hugging Face llama rotates the pair (x_j, x_{j+D/2}) by position * theta^(-2j/D).
Putting the members of each pair next to each other (once, in the rows of the query and key weights) makes a head of D
reals a vector of D/2 complex numbers, and the rotation one product with exp(i * angle). Scores do not change: queries
and keys are permuted alike.

Shapes: N rows, H heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def interleave_pairs(weight_OI: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of a query or key projection `[H * D, I]` so that rotated pairs are neighbours."""
    halves = weight_OI.view(-1, 2, head_dim // 2, weight_OI.shape[1])
    return halves.transpose(1, 2).reshape(weight_OI.shape)


def rotations(head_dim: int, theta: float, num_positions: int) -> Tensor:
    """Table `[positions, D/2]` complex64 of exp(i * position * theta^(-2j/D)), built in float64."""
    return rotation_table(theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim), num_positions)


def rotation_table(frequency_C: Tensor, num_positions: int, multiplier: float = 1.0) -> Tensor:
    """Table `[positions, C]` complex64 of multiplier * exp(i * position * frequency)."""
    angle = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequency_C
    return torch.polar(torch.full_like(angle, multiplier), angle).to(torch.complex64)


def rotate_(heads_NHD: Tensor, rotation_N1C: Tensor) -> None:
    """Rotate interleaved heads in place. `rotation_N1C` is `[N, 1, D/2]`, rows of `rotations`."""
    pairs = torch.view_as_complex(heads_NHD.view(*heads_NHD.shape[:-1], -1, 2))
    pairs.mul_(rotation_N1C)


def fused_rotation(rotation_N1C: Tensor, num_rotated: int, num_kept: int) -> Tensor:
    """Factors `[N, (num_rotated + num_kept) * D/2]` for whole rows of heads, of which the last stay as they are."""
    num_rows, _, size = rotation_N1C.shape
    ones = torch.ones(num_rows, num_kept * size, device=rotation_N1C.device)
    return torch.cat((rotation_N1C.expand(-1, num_rotated, -1).flatten(1), ones), 1)


def rotate_rows_(rows_NE: Tensor, factor_NC: Tensor) -> None:
    """`rotate_` on whole contiguous rows: one product, with the same bits. `factor_NC` is a `fused_rotation`."""
    rows_NE.view(torch.complex64).mul_(factor_NC)
