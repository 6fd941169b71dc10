"""Write an MTP part as the gate wants to find it: weights, and a manifest whose fingerprints are of what is stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.checkpoint.family import contract_of
from seqmtp_serve.checkpoint.fingerprint import tensor_fingerprint
from seqmtp_serve.checkpoint.manifest import EMBEDDING_OWNER, MTP_HEAD_OWNERS
from seqmtp_serve.checkpoint.mtp_manifest import MANIFEST_FILE, MtpManifest, parse_mtp_manifest
from seqmtp_serve.checkpoint.safetensors_reader import SINGLE_FILE
from seqmtp_serve.model.config import MtpConfig


def write_mtp_part(
    folder: Path,
    target: Checkpoint,
    layers: Mapping[str, Tensor],
    config: MtpConfig,
    *,
    training: Mapping[str, Any],
    storage: torch.dtype = torch.bfloat16,
    source_commit: str = "",
) -> MtpManifest:
    """Store `layers` (full names, `model.layers.{n}.…`) beside a manifest that declares `config` for `target`.

    Floating tensors are rounded to `storage`; integers (`draft_token_ids`) become int32. `training` is the free-form
    record of how the weights were made. Writes the weights first: a folder with a new manifest is whole. Returns the
    manifest. Raises MtpIncomplete when the record would not pass as a manifest.
    """
    stored = {name: _as_stored(tensor, storage) for name, tensor in layers.items()}
    record = target.manifest.target
    main = range(record.num_main_layers, record.num_main_layers + config.num_modules)
    shared = asdict(record.fingerprints) | ({"head": None} if record.tied_head else {})
    declared = {
        "target_checkpoint": record.name,
        "target_sha256": record.source_digest,
        "architecture": record.family,
        "num_main_layers": record.num_main_layers,
        "num_checkpoint_mtp_layers": config.num_modules,
        "mtp_layer_ids": list(main),
        "vocab_size": record.vocab_size,
        "hidden_size": record.hidden_size,
        "draft_vocab_size": config.draft_vocab_size,
        "fusion_order": config.fusion_order,
        "norm_flavour": config.norm_flavour,
        "fed_hidden": config.fed_hidden,
        "recycled_hidden": config.recycled_hidden,
        "position0_zeroing": config.zero_position0,
        "rollout": config.rollout,
        "final_norm_owner": config.final_norm_owner,
        "embedding_owner": EMBEDDING_OWNER,
        "output_head_owner": MTP_HEAD_OWNERS[config.final_norm_owner],
        "requires_physical_training_aliases": True,
        "rope": asdict(record.rope),
        "fingerprints": shared,
        "tensor_fingerprints": {name: tensor_fingerprint(tensor) for name, tensor in stored.items()},
        "storage_dtype": str(storage).removeprefix("torch."),
        "compute_dtype": "float32",
        "cache_layout": contract_of(target.config).mtp_cache_layout,
        "expert_layout": record.expert_layout,
        "quantization": "none",
        "source_commit": source_commit,
        "training": dict(training),
    }
    manifest = parse_mtp_manifest(declared)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / SINGLE_FILE, metadata={"format": "pt"})
    (folder / MANIFEST_FILE).write_text(json.dumps(declared, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return manifest


def _as_stored(tensor: Tensor, storage: torch.dtype) -> Tensor:
    return tensor.detach().to(storage if tensor.is_floating_point() else torch.int32).contiguous()
