"""The seam between files and tensors: where a tensor lies, and a mapping that reads it only when it is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from seqmtp_serve.checkpoint.fingerprint import tensor_fingerprint
from seqmtp_serve.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What a file's header says about one tensor: `dtype` is the stored one (`Q4_1`, `BF16`, `F32`, ...)."""

    shape: tuple[int, ...]
    dtype: str
    file: Path

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


class TensorSource(Protocol):
    """Tensors of one checkpoint part under Hugging Face names. Opening reads headers only."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor in the files, by name."""
        ...

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Tensors that should be in the files but whose header cannot be read: name -> why. None is in `specs`."""
        ...

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """The tensor, or `rows` of its first dimension: float32, or its own dtype if it holds integers.

        Raises CheckpointError, naming the tensor, when its bytes cannot be read.
        """
        ...


class LazyTensors(Mapping[str, Tensor]):
    """`names` of a source as a mapping that reads on access and refuses values not finite, or not those declared.

    Nothing is kept but weak references: while anybody holds a tensor, asking again gives the same object (so a tied
    embedding and head stay one storage); once it is dropped its memory is free. `error` is the type raised: whose
    gate the tensor belongs to. `fingerprints` are those of tensors whose values were declared. Not thread-safe.
    """

    def __init__(
        self,
        source: TensorSource,
        names: Iterable[str],
        *,
        error: type[CheckpointError],
        fingerprints: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._source, self._names, self._error = source, dict.fromkeys(names), error
        self._fingerprints = fingerprints
        self._alive: WeakValueDictionary[str, Tensor] = WeakValueDictionary()

    def __getitem__(self, key: str) -> Tensor:
        if key not in self._names:
            raise KeyError(key)
        tensor = self._alive.get(key)
        if tensor is None:
            try:
                tensor = self._source.read(key)
            except CheckpointError as fault:
                raise self._error(str(fault)) from fault
            if not all_finite(tensor):
                raise self._error(f"{key}: holds values that are not finite")
            if key in self._fingerprints and tensor_fingerprint(tensor) != self._fingerprints[key]:
                raise self._error(f"{key}: holds other values than its manifest says")
            self._alive[key] = tensor
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, key: object) -> bool:
        return key in self._names


class JoinedTensors(Mapping[str, Tensor]):
    """One mapping over several: each key is read from the mapping that owns it."""

    def __init__(self, owners: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._owners = dict(owners)

    def __getitem__(self, key: str) -> Tensor:
        return self._owners[key][key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, key: object) -> bool:
        return key in self._owners


def all_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite: one pass, and no mask as large as the tensor."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor)  # both are NaN as soon as one value is
    return bool(torch.isfinite(low) & torch.isfinite(high))
