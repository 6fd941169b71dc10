"""Write a folder checkpoint anew: without its MTP layers, with plain weights for block-scaled ones, or with the fusion
in the other order. One tensor is in memory at a time, one shard on its way out.

The result is an ordinary checkpoint: any runtime that reads the layout loads it. `config.json` is written last, so a
folder that has one is whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from seqmtp_serve.checkpoint import names
from seqmtp_serve.checkpoint.block_scaled_source import is_block_scaled
from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.checkpoint.fp8 import SCALE_SUFFIX, BlockFormat, format_of_record
from seqmtp_serve.checkpoint.fusion import swapped_halves, swapped_scales
from seqmtp_serve.checkpoint.mtp_manifest import MANIFEST_FILE, MtpManifest, write_mtp_manifest
from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.checkpoint.parts import layers_beyond
from seqmtp_serve.checkpoint.safetensors_reader import INDEX_FILE, SINGLE_FILE, SafetensorsSource
from seqmtp_serve.checkpoint.seal import sealed
from seqmtp_serve.errors import InvalidField

_CONFIG = "config.json"
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What to change. `plain` is what block-scaled weights become (None: they stay as stored); other tensors keep
    their dtype. `fusion_order` "": as stored.
    """

    target_only: bool = False
    plain: torch.dtype | None = None
    fusion_order: str = ""


def convert(folder: Path, out: Path, wanted: Conversion) -> None:
    """Write `folder`, changed as `wanted`, into `out`, which must be new or empty.

    With MTP layers, a manifest that seals them goes along. Raises InvalidField for what cannot be converted,
    TargetIncomplete or MtpIncomplete when the part to be written does not pass its gate.
    """
    if not folder.is_dir():
        raise InvalidField(f"{folder}: only a folder of safetensors can be exported", param="model")
    if out.exists() and any(out.iterdir()):
        raise InvalidField(f"{out}: is not empty", param="out")
    checkpoint = open_checkpoint(str(folder))
    checkpoint.gates(deep=False).target.require()
    manifest = None if wanted.target_only else sealed(checkpoint)
    swaps = manifest is not None and wanted.fusion_order not in ("", manifest.fusion_order)
    writer = _Writer(checkpoint, wanted, swaps=swaps)
    out.mkdir(parents=True, exist_ok=True)
    weight_map = writer.write_shards(out)
    config = _config(json.loads((folder / _CONFIG).read_text(encoding="utf-8")), wanted)
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.suffix not in _WEIGHTS and file.name not in (_CONFIG, INDEX_FILE, MANIFEST_FILE):
            shutil.copyfile(file, out / file.name)
    if set(weight_map.values()) != {SINGLE_FILE}:
        index = {"metadata": {"total_size": writer.total_size}, "weight_map": weight_map}
        (out / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    if manifest is not None:
        write_mtp_manifest(out, _unsealed(manifest, wanted))
    (out / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if manifest is not None:
        write_mtp_manifest(out, sealed(open_checkpoint(str(out))))


def _unsealed(manifest: MtpManifest, wanted: Conversion) -> MtpManifest:
    """What the result declares, before its values are recorded. The fusion as a map keeps its fingerprint in any order:
    sealing anew checks it, unless values were rounded.
    """
    return replace(
        manifest,
        fusion_order=wanted.fusion_order or manifest.fusion_order,
        quantization=manifest.quantization if wanted.plain is None else "none",
        tensor_fingerprints=(),
        fusion_fingerprints=manifest.fusion_fingerprints if wanted.plain is None else (),
    )


class _Writer:
    """Tensors of one checkpoint on their way into another. Which shard holds a tensor does not change."""

    def __init__(self, checkpoint: Checkpoint, wanted: Conversion, *, swaps: bool) -> None:
        self._source = checkpoint.target_source
        self._stored = SafetensorsSource(checkpoint.path)
        self._wanted, self._swaps, self._size = wanted, swaps, checkpoint.config.hidden_size
        later = layers_beyond(checkpoint.config.num_layers, self._stored.specs)
        self._dropped = tuple(map(names.layer_prefix, later)) if wanted.target_only else ()
        self._blocks: BlockFormat | None = format_of_record(checkpoint.manifest.target.quantization)
        self.total_size = 0

    def write_shards(self, out: Path) -> dict[str, str]:
        """Returns which file each tensor went to."""
        kept = [name for name in self._stored.specs if not name.startswith(self._dropped)]
        weight_map: dict[str, str] = {}
        for file in dict.fromkeys(self._stored.specs[name].file for name in kept):
            shard = {n: t for name in kept if self._stored.specs[name].file == file for n, t in self._converted(name)}
            if shard:
                save_file(shard, out / file.name, metadata={"format": "pt"})
            self.total_size += sum(tensor.numel() * tensor.element_size() for tensor in shard.values())
            weight_map |= dict.fromkeys(shard, file.name)
        return weight_map

    def _converted(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """The tensor as it is stored anew; nothing for the scales of a weight that becomes plain."""
        weight = name.removesuffix(SCALE_SUFFIX)
        plain = (
            self._wanted.plain if is_block_scaled(self._stored.specs.get(weight, self._stored.specs[name])) else None
        )
        if plain is not None and weight != name:
            return
        tensor = self._source.read(name).to(plain) if plain is not None else self._stored.read_stored(name)
        if self._swaps and weight.endswith(names.EH_PROJ):
            tensor = self._turned(tensor, is_scale=weight != name)
        yield name, tensor.contiguous()

    def _turned(self, tensor: Tensor, *, is_scale: bool) -> Tensor:
        if not is_scale:
            return swapped_halves(tensor)
        assert self._blocks is not None, "scales belong to block-scaled weights"
        try:
            return swapped_scales(tensor, self._size, self._blocks)
        except ValueError as fault:
            raise InvalidField(f"fusion_order: {fault}", param="fusion_order") from fault


def _config(found: dict[str, Any], wanted: Conversion) -> dict[str, Any]:
    """`config.json` of the result. transformers takes an absent number of MTP layers for one, so none is said aloud."""
    if wanted.target_only and any(name in found for name in _COUNTS):
        found = {name: value for name, value in found.items() if name not in _COUNTS} | {_COUNTS[0]: 0}
    if wanted.plain is not None and found.pop("quantization_config", None) is not None:
        found = {name: value for name, value in found.items() if name not in ("torch_dtype", "dtype")}
        found["torch_dtype"] = str(wanted.plain).removeprefix("torch.")
    return found
