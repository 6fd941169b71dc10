"""Tensors out of safetensors files: headers first, then each tensor (or a slice of its rows) when it is asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from seqmtp_serve.checkpoint.tensor_source import TensorSpec
from seqmtp_serve.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class SafetensorsSource:
    """A TensorSource over `model.safetensors`, or over the shards that `model.safetensors.index.json` lists.

    Raises CheckpointError for a missing or unreadable file, and for an index that names a tensor its shard lacks.
    """

    def __init__(self, folder: Path) -> None:
        self._specs = _planned(folder) if (folder / INDEX_FILE).exists() else _headers(folder / SINGLE_FILE)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self._specs

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        spec = self._specs.get(name)
        if spec is None:
            raise CheckpointError(f"{name}: not in the checkpoint")
        try:
            with safe_open(str(spec.file), framework="pt") as file:
                tensor: Tensor = file.get_tensor(name) if rows is None else file.get_slice(name)[rows]
        except (SafetensorError, OSError) as fault:
            raise CheckpointError(f"{name}: cannot be read from {spec.file.name} ({fault})") from fault
        return tensor.float() if tensor.is_floating_point() else tensor


def _planned(folder: Path) -> dict[str, TensorSpec]:
    try:
        weight_map: dict[str, str] = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    except (ValueError, KeyError) as fault:
        raise CheckpointError(f"{INDEX_FILE}: has no weight_map ({fault})") from fault
    shards = {file: _headers(folder / file) for file in sorted(set(weight_map.values()))}
    specs: dict[str, TensorSpec] = {}
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise CheckpointError(f"{name}: {INDEX_FILE} places it in {file}, which lacks it")
        specs[name] = shards[file][name]
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
