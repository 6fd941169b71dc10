"""Open a checkpoint: find its files, read its headers, and hand out its parts, each behind its own gate.

Opening reads no weights. `target_tensors` and `mtp_tensors` are lazy mappings; the tensors both share (embedding, final
norm, head) come from one of them, so they are the same objects. Not thread-safe.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seqmtp_serve.checkpoint import names
from seqmtp_serve.checkpoint.block_scaled_source import BlockScaledSource
from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.checkpoint.deepseek_config import deepseek_config_from_hf
from seqmtp_serve.checkpoint.fp8 import BlockFormat, format_of_record
from seqmtp_serve.checkpoint.gguf_reader import GgufSource
from seqmtp_serve.checkpoint.llama_config import llama_config_from_gguf, llama_config_from_hf
from seqmtp_serve.checkpoint.locate import Location, locate
from seqmtp_serve.checkpoint.mtp_manifest import MtpManifest, read_mtp_manifest
from seqmtp_serve.checkpoint.parts import MtpPart, TargetPart
from seqmtp_serve.checkpoint.released_manifest import released_manifest
from seqmtp_serve.checkpoint.safetensors_reader import SafetensorsSource
from seqmtp_serve.checkpoint.tensor_source import TensorSource
from seqmtp_serve.checkpoint.tokenizer import TextContract, gguf_text_contract, hf_text_contract
from seqmtp_serve.errors import CheckpointError, MtpIncomplete, TargetIncomplete


def open_checkpoint(model: str, mtp: str | None = None) -> Checkpoint:
    """Open `model` (a folder, a `.gguf` file, a built-in name) and the MTP part `mtp` (a folder), if there is one.

    Raises ModelNotFound, or TargetIncomplete when the target's own headers or configuration cannot be read. A broken
    MTP part raises nothing here: `gates()` reports it and `mtp_tensors()` raises MtpIncomplete.
    """
    location = locate(model, mtp)
    try:
        target = _open_gguf(location.target) if location.target.is_file() else _open_folder(location.target)
    except TargetIncomplete:
        raise
    except CheckpointError as fault:
        raise TargetIncomplete(str(fault)) from fault
    return Checkpoint(location, target, _open_mtp(location, target))


def _open_gguf(path: Path) -> TargetPart:
    source = GgufSource(path)
    config = llama_config_from_gguf(source.metadata, has_head=names.HEAD in source.specs)
    return TargetPart(config=config, source=source, text=gguf_text_contract(source.metadata))


def _open_folder(folder: Path) -> TargetPart:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise TargetIncomplete(f"config.json: cannot be read ({fault})") from fault
    text, stored = hf_text_contract(folder), SafetensorsSource(folder)
    part = _llama(found, stored, text) if found.get("model_type") == "llama" else _deepseek(found, stored, text)
    later = tuple(names.layer_prefix(layer) for layer in part.later_layers)
    for name, reason in stored.unreadable.items():
        if not name.startswith(later):  # an MTP layer's are the MTP gate's business
            raise TargetIncomplete(f"{name}: {reason}")
    return part


def _llama(found: Mapping[str, Any], stored: SafetensorsSource, text: TextContract) -> TargetPart:
    return TargetPart(config=llama_config_from_hf(found), source=stored, text=text)


def _deepseek(found: Mapping[str, Any], stored: SafetensorsSource, text: TextContract) -> TargetPart:
    declared = deepseek_config_from_hf(found)
    return TargetPart(
        config=declared.model,
        source=_with_scales(stored, declared.quantization),
        text=text,
        family=declared.family,
        num_mtp_layers=declared.num_mtp_layers,
        blocks=declared.quantization,
    )


def _with_scales(stored: SafetensorsSource, blocks: BlockFormat | None) -> TensorSource:
    return stored if blocks is None else BlockScaledSource(stored, blocks)


def _open_mtp(location: Location, target: TargetPart) -> MtpPart | MtpIncomplete | None:
    try:
        if location.mtp is None:
            released = released_manifest(location.name, target)
            return None if released is None else _in_the_targets_files(released, target)
        manifest = read_mtp_manifest(location.mtp)
        if location.mtp == location.target:
            return _in_the_targets_files(manifest, target)
        blocks = format_of_record(manifest.quantization)
        source = _with_scales(SafetensorsSource(location.mtp), blocks)
        return MtpPart(manifest=manifest, source=source, own_files=True, blocks=blocks)
    except MtpIncomplete as fault:
        return fault
    except CheckpointError as fault:
        return MtpIncomplete(str(fault))


def _in_the_targets_files(manifest: MtpManifest, target: TargetPart) -> MtpPart:
    return MtpPart(manifest=manifest, source=target.source, own_files=False, blocks=target.blocks)
