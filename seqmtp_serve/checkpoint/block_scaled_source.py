"""Block-scaled weights as plain ones: a source that joins each weight with its scales as it is read.

A weight and its scales may lie in different shards; each is found by name. Reading some rows reads the scales of their
blocks only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from seqmtp_serve.checkpoint.fp8 import SCALE_SUFFIX, STORED_DTYPE, BlockFormat, dequantise
from seqmtp_serve.checkpoint.tensor_source import TensorSource, TensorSpec
from seqmtp_serve.errors import CheckpointError


class BlockScaledSource:
    """A TensorSource over another one. Weights that are not block-scaled, and the scales themselves, pass through."""

    def __init__(self, stored: TensorSource, blocks: BlockFormat) -> None:
        self.stored, self.blocks = stored, blocks

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self.stored.specs

    @property
    def unreadable(self) -> Mapping[str, str]:
        return self.stored.unreadable

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        spec = self.specs.get(name)
        if spec is None or spec.dtype != STORED_DTYPE:
            return self.stored.read(name, rows)
        start, stop, step = (rows or slice(None)).indices(spec.shape[0])
        assert step == 1, "rows of a slice are neighbours"
        first = start // self.blocks.rows * self.blocks.rows  # read from the block's first row, so that scales line up
        if name + SCALE_SUFFIX not in self.specs:
            raise CheckpointError(f"{name}: its scales {name + SCALE_SUFFIX} are missing")
        scale = self.stored.read(
            name + SCALE_SUFFIX, slice(first // self.blocks.rows, -(-stop // self.blocks.rows)) if rows else None
        )
        weight = self.stored.read(name, slice(first, stop) if rows else None)
        return dequantise(weight, scale, self.blocks)[start - first :]


def scale_shapes(
    specs: Mapping[str, TensorSpec], weights: Iterable[str], blocks: BlockFormat | None
) -> dict[str, tuple[int, ...]]:
    """The scales that must lie beside those of `weights` that are stored block-scaled: name -> shape."""
    if blocks is None:
        return {}
    scaled = [name for name in weights if name in specs and is_block_scaled(specs[name])]
    return {name + SCALE_SUFFIX: blocks.scale_shape(specs[name].shape) for name in scaled}


def is_block_scaled(spec: TensorSpec) -> bool:
    """Only matrices can be."""
    return spec.dtype == STORED_DTYPE and len(spec.shape) == 2
