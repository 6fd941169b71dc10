"""Open a checkpoint: find its files, read its headers, and hand out its parts, each behind its own gate.

Opening reads no weights. `target_tensors` and `mtp_tensors` are lazy mappings; the tensors both share (embedding, final
norm, head) come from one of them, so they are the same objects. Not thread-safe.
"""

from __future__ import annotations

import json
from pathlib import Path

from seqmtp_serve.checkpoint import names
from seqmtp_serve.checkpoint.checkpoint import Checkpoint, MtpPart, TargetPart
from seqmtp_serve.checkpoint.gguf_reader import GgufSource
from seqmtp_serve.checkpoint.llama_config import llama_config_from_gguf, llama_config_from_hf
from seqmtp_serve.checkpoint.locate import Location, locate
from seqmtp_serve.checkpoint.mtp_manifest import read_mtp_manifest
from seqmtp_serve.checkpoint.safetensors_reader import SafetensorsSource
from seqmtp_serve.checkpoint.tokenizer import gguf_text_contract, hf_text_contract
from seqmtp_serve.errors import CheckpointError, MtpIncomplete, TargetIncomplete


def open_checkpoint(model: str, mtp: str | None = None) -> Checkpoint:
    """Open `model` (a folder, a `.gguf` file, the built-in name) and the MTP part `mtp` (a folder), if there is one.

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
    return TargetPart(
        config=llama_config_from_hf(found), source=SafetensorsSource(folder), text=hf_text_contract(folder)
    )


def _open_mtp(location: Location, target: TargetPart) -> MtpPart | MtpIncomplete | None:
    if location.mtp is None:
        return None
    own_files = location.mtp != location.target
    try:
        manifest = read_mtp_manifest(location.mtp)
        source = SafetensorsSource(location.mtp) if own_files else target.source
    except MtpIncomplete as fault:
        return fault
    except CheckpointError as fault:
        return MtpIncomplete(str(fault))
    return MtpPart(manifest=manifest, source=source, own_files=own_files)
