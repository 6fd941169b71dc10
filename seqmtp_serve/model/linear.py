"""Linear layers whose every row is computed alike, whatever the other rows: int8 with a scale per row, or fp32.

int8: each activation row is divided by its own max |x|, multiplied in int8 against per-channel int8 weights with exact
integer accumulation, and scaled back, so a row's bits cannot depend on its neighbours. fp32: the GEMM library picks
another kernel (and another summation order) for one to three rows, so rows are padded to a multiple of `ROW_TILE`.
Beside them bf16, for GPUs and `fast` numerics, which promises nothing about bits.

Shapes: N rows, I inputs, O outputs, H heads.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from seqmtp_serve.model.kernels import int8_product
from seqmtp_serve.model.numerics import COLUMN_TILE, ROW_TILE, Numerics

Linear = Callable[[Tensor], Tensor]  # [N, I] fp32 -> [N, O] fp32
_TINY = 1e-30  # keeps an all-zero row at zero


class Fp32Linear:
    """The plain form, `x @ W.T`, on rows padded to `row_tile` (1: not padded).

    `fixed_tiles` runs one product of exactly `row_tile` rows at a time: the same shape, hence the same bits, on any
    machine. Fewer outputs than `COLUMN_TILE` are padded to it: the bits of two or three depend on a row's place on some
    CPUs.
    """

    def __init__(self, weight_OI: Tensor, *, row_tile: int = ROW_TILE, fixed_tiles: bool = False) -> None:
        self._num_outputs = weight_OI.shape[0]
        if row_tile > 1 and self._num_outputs < COLUMN_TILE:
            weight_OI = F.pad(weight_OI, (0, 0, 0, COLUMN_TILE - self._num_outputs))
        self._weight_OI = weight_OI.float().contiguous()  # the same memory, if it can be
        self._row_tile = row_tile
        self._fixed_tiles = fixed_tiles

    def __call__(self, x_NI: Tensor) -> Tensor:
        num_rows = x_NI.shape[0]
        padding = -num_rows % self._row_tile
        if padding:
            x_NI = F.pad(x_NI, (0, 0, 0, padding))
        if self._fixed_tiles:
            tiles = torch.split(x_NI, self._row_tile)
            return torch.cat([F.linear(tile, self._weight_OI) for tile in tiles])[:num_rows, : self._num_outputs]
        out_NO = F.linear(x_NI, self._weight_OI)[:num_rows]
        return out_NO if out_NO.shape[1] == self._num_outputs else out_NO[:, : self._num_outputs]


class Bf16Linear:
    """Operands rounded to bf16, sums in float32 as the library keeps them, and a bf16 result widened again."""

    def __init__(self, weight_OI: Tensor) -> None:
        self._weight_OI = weight_OI.to(torch.bfloat16).contiguous()

    def __call__(self, x_NI: Tensor) -> Tensor:
        return F.linear(x_NI.to(torch.bfloat16), self._weight_OI).float()


class PerHeadLinear:
    """A product of its own for each head, `[N, H, I]` to `[N, H, O]`, in fp32 and in the same row tiles.

    O is padded to `COLUMN_TILE`: batched products compute the columns beyond whole vectors in an order that depends on
    where a row stands.
    """

    def __init__(self, weight_HOI: Tensor, numerics: Numerics) -> None:
        self._num_outputs = weight_HOI.shape[1]
        padding = -self._num_outputs % COLUMN_TILE
        self._weight_HIO = F.pad(weight_HOI.float(), (0, 0, 0, padding)).transpose(1, 2).contiguous()
        self._row_tile = ROW_TILE if numerics.invariant else 1
        self._fixed_tiles = numerics.fixed_tiles

    def __call__(self, x_NHI: Tensor) -> Tensor:
        num_rows = x_NHI.shape[0]
        x_HNI = F.pad(x_NHI, (0, 0, 0, 0, 0, -num_rows % self._row_tile)).transpose(0, 1).contiguous()
        if self._fixed_tiles:
            tiles = torch.split(x_HNI, self._row_tile, 1)
            out_HNO = torch.cat([torch.bmm(tile, self._weight_HIO) for tile in tiles], 1)
        else:
            out_HNO = torch.bmm(x_HNI, self._weight_HIO)
        return out_HNO.transpose(0, 1)[:num_rows, :, : self._num_outputs]


class Int8Linear:
    """Per-row dynamic int8. One layer is within about 2 % (relative) of `Fp32Linear` on the same weights.

    `levels` bounds the activation codes to zero_point ± levels: 127 where the CPU accumulates exactly, 63 where its
    multiply-add of pairs would saturate at int16 (see `probe.py`).
    """

    def __init__(self, weight_OI: Tensor, *, levels: int) -> None:
        self._packed = _pack(weight_OI)
        self._step = 1.0 / levels
        self._zero_point = levels + 1

    def __call__(self, x_NI: Tensor) -> Tensor:
        scale_N1 = x_NI.abs().amax(-1, keepdim=True).clamp_min_(_TINY)
        return int8_product(x_NI / scale_N1, self._step, self._zero_point, self._packed).mul_(scale_N1)


class FineInt8Linear:
    """Int8 weights, and activations in two int8 planes: the rounded row, and what rounding it lost.

    For inputs whose few huge channels would round all others away. The planes are rows of one product: for a few rows
    that costs what one plane costs, because the product waits for its weights.
    """

    def __init__(self, weight_OI: Tensor, *, levels: int) -> None:
        self._packed = _pack(weight_OI)
        self._zero_point = levels + 1
        # Constants as tensors: torch is slower to take a number than to read one.
        self._step = torch.tensor(1.0 / levels)
        self._refine = torch.tensor(2.0 * levels)  # at most half a step is lost by rounding
        self._refined = 0.5 / levels

    def __call__(self, x_NI: Tensor) -> Tensor:
        num_rows = x_NI.shape[0]
        step_N1 = x_NI.abs().amax(-1, keepdim=True).mul_(self._step).clamp_min_(_TINY)
        codes_NI = x_NI / step_N1
        coarse_NI = codes_NI.round()
        fine_NI = codes_NI.sub_(coarse_NI).mul_(self._refine)
        planes_2NO = int8_product(torch.cat((coarse_NI, fine_NI)), 1.0, self._zero_point, self._packed)
        return planes_2NO[:num_rows].add_(planes_2NO[num_rows:], alpha=self._refined).mul_(step_N1)


def _pack(weight_OI: Tensor) -> torch.ScriptObject:
    """Symmetric int8 codes with one scale per output channel, in the layout the int8 GEMM wants."""
    scale_O = weight_OI.abs().amax(1).double().clamp_min(_TINY) / 127
    zero_O = torch.zeros(weight_OI.shape[0], dtype=torch.long)
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.quantize_* are deprecated in favour of torchao, which is no lighter
            codes_OI = torch.quantize_per_channel(weight_OI.float(), scale_O, zero_O, 0, torch.qint8)
            packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(codes_OI, None)
    finally:
        torch.backends.quantized.engine = engine
    return packed


def make_linear(weights: Sequence[Tensor], numerics: Numerics, *, fine: bool = False) -> Linear:
    """One layer from weights `[O_k, I]` stacked along O (fused projections), in the form `numerics` asks for.

    `fine` asks for two activation planes where the layer is int8.
    """
    weight_OI = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
    if numerics.int8_levels:
        form = FineInt8Linear if fine else Int8Linear
        return form(weight_OI, levels=numerics.int8_levels)
    if numerics.product_dtype is torch.bfloat16:
        return Bf16Linear(weight_OI)
    if not numerics.invariant:
        return Fp32Linear(weight_OI, row_tile=1)
    return Fp32Linear(weight_OI, fixed_tiles=numerics.fixed_tiles)
