"""A GGUF file's header: metadata and where each tensor lies (ggml `docs/gguf.md`, versions 2 and 3, little-endian).

The `gguf` package reads the same, but makes a NumPy object of every string in the vocabulary: about 100,000 of them
for SmolLM2 and several seconds. Each process of the service opens the file at start, so the header is read here in a
tenth of a second; that package stays the oracle of the test and still undoes the quantisation (`gguf_reader.py`).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seqmtp_serve.errors import CheckpointError

_SCALARS = {  # value type -> struct format
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One tensor's entry. `shape` is in row-major order (GGUF stores it reversed); `start` is a file offset, bytes."""

    shape: tuple[int, ...]
    ggml_type: int
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Parse the header of `path`. Raises CheckpointError for a file that is not GGUF, is cut short or has bad text."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data).header()
    except (struct.error, OSError, ValueError, KeyError) as fault:
        raise CheckpointError(f"{path.name}: not a readable GGUF file ({fault})") from fault


class _Cursor:
    """Reads forward through the mapped bytes."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def header(self) -> GgufHeader:
        magic, version = self._take(4), self._scalar("<I")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"magic {magic!r}, version {version}")
        num_tensors, num_keys = self._scalar("<Q"), self._scalar("<Q")
        metadata = {self._string(): self._value(self._scalar("<I")) for _ in range(num_keys)}
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        base = -(-self._at // alignment) * alignment
        tensors = {
            name: GgufTensor(shape=shape, ggml_type=kind, start=base + offset) for name, shape, kind, offset in entries
        }
        return GgufHeader(metadata=metadata, tensors=tensors)

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self._string(), self._scalar("<I")
        shape = tuple(reversed([self._scalar("<Q") for _ in range(num_dims)]))
        return name, shape, self._scalar("<I"), self._scalar("<Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        item_kind, length = self._scalar("<I"), self._scalar("<Q")
        if item_kind in (_STRING, _ARRAY):
            return [self._value(item_kind) for _ in range(length)]
        item = _SCALARS[item_kind]
        block = self._take(struct.calcsize(item) * length)
        return [value for (value,) in struct.iter_unpack(item, block)]

    def _string(self) -> str:
        return self._take(self._scalar("<Q")).decode("utf-8")

    def _scalar(self, layout: str) -> Any:
        (value,) = struct.unpack(layout, self._take(struct.calcsize(layout)))
        return value

    def _take(self, size: int) -> bytes:
        taken = self._data[self._at : self._at + size]
        if len(taken) != size:
            raise ValueError(f"ends inside its header at byte {self._at}")
        self._at += size
        return taken
