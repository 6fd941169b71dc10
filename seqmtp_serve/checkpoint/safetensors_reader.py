"""Tensors out of safetensors files: headers first, then each tensor (or a slice of its rows) when it is asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from seqmtp_serve.checkpoint.tensor_source import TensorSpec
from seqmtp_serve.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(slots=True, kw_only=True)
class ReadCount:
    """What was read since the source was opened, headers apart: for a rank, its share of the files."""

    num_tensors: int = 0
    num_bytes: int = 0


class SafetensorsSource:
    """A TensorSource over `model.safetensors`, or over the shards that `model.safetensors.index.json` lists.

    A shard that is missing or broken, or that lacks what the index places in it, leaves its tensors `unreadable`: whose
    they are decides whether anything can be served. Raises CheckpointError for a single file or an index that cannot be
    read. The shard read last stays open: neighbours lie in one file.
    """

    def __init__(self, folder: Path) -> None:
        self.count = ReadCount()
        self._unreadable: dict[str, str] = {}
        self._open: tuple[Path, Any] | None = None
        if (folder / INDEX_FILE).exists():
            self._specs = self._planned(folder)
        else:
            self._specs = _headers(folder / SINGLE_FILE)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self._specs

    @property
    def unreadable(self) -> Mapping[str, str]:
        return self._unreadable

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        tensor = self.read_stored(name, rows)
        return tensor.float() if tensor.is_floating_point() else tensor

    def read_stored(self, name: str, rows: slice | None = None) -> Tensor:
        """As `read`, in the stored dtype."""
        spec = self._specs.get(name)
        if spec is None:
            raise CheckpointError(f"{name}: {self._unreadable.get(name, 'not in the checkpoint')}")
        try:
            file = self._file(spec.file)
            tensor: Tensor = file.get_tensor(name) if rows is None else file.get_slice(name)[rows]
        except (SafetensorError, OSError) as fault:
            raise CheckpointError(f"{name}: cannot be read from {spec.file.name} ({fault})") from fault
        self.count.num_tensors += 1
        self.count.num_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def _file(self, path: Path) -> Any:
        if self._open is None or self._open[0] != path:
            self._open = (path, safe_open(str(path), framework="pt"))
        return self._open[1]

    def _planned(self, folder: Path) -> dict[str, TensorSpec]:
        try:
            weight_map: dict[str, str] = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
        except (ValueError, KeyError) as fault:
            raise CheckpointError(f"{INDEX_FILE}: has no weight_map ({fault})") from fault
        specs: dict[str, TensorSpec] = {}
        shards: dict[str, dict[str, TensorSpec] | str] = {}
        for name, file in weight_map.items():
            if file not in shards:
                try:
                    shards[file] = _headers(folder / file)
                except CheckpointError as fault:
                    shards[file] = str(fault)
            shard = shards[file]
            if isinstance(shard, str):
                self._unreadable[name] = shard
            elif name not in shard:
                self._unreadable[name] = f"{INDEX_FILE} places it in {file}, which lacks it"
            else:
                specs[name] = shard[name]
        return specs


def _headers(path: Path) -> dict[str, TensorSpec]:
    try:
        with safe_open(str(path), framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            return {
                name: TensorSpec(shape=tuple(part.get_shape()), dtype=part.get_dtype(), file=path)
                for name, part in slices.items()
            }
    except (SafetensorError, OSError) as fault:
        raise CheckpointError(f"{path.name}: not a readable safetensors file ({fault})") from fault
