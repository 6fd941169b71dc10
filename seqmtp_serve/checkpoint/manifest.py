"""The immutable record of what a checkpoint is: made before anything is loaded, hashed into every trace.

Canonical JSON (sorted keys, no spaces, UTF-8) is the only serialised form, so equal records have equal fingerprints.
Precision is layered: `storage_dtypes` are the files', the rest is what the released numbers were computed in. How a
server computes (int8, fp32) is the engine's configuration, not the checkpoint's.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from seqmtp_serve.checkpoint.mtp_manifest import MtpManifest, RopeContract

EMBEDDING_OWNER = "main.embed_tokens"
OUTPUT_HEAD_OWNER = "main.norm+lm_head"
# By the owner of the norm before an MTP module's head: released modules bring a norm of their own.
MTP_HEAD_OWNERS = {"main": OUTPUT_HEAD_OWNER, "mtp": "mtp.shared_head.norm+lm_head", "none": "lm_head"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprints:
    """sha256 of float32 bytes (`fingerprint.py`) of the tensors a module shares with its target.

    With a tied head, `head` equals `embedding`.
    """

    embedding: str
    output_norm: str
    head: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The dtype of each layer of the computation the released numbers refer to."""

    fusion: str = "float32"
    rms_reduction: str = "float32"
    attention: str = "float32"
    head: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetManifest:
    """The main model. `source_digest` is the sha256 of its bytes (a GGUF) or of its headers (a folder of shards)."""

    name: str
    family: str
    source_digest: str
    num_main_layers: int
    vocab_size: int
    hidden_size: int
    rope: RopeContract
    tied_head: bool
    fingerprints: Fingerprints
    storage_dtypes: tuple[str, ...]
    cache_layout: str
    expert_layout: str
    quantization: str
    precision: Precision = Precision()
    embedding_owner: str = EMBEDDING_OWNER
    output_head_owner: str = OUTPUT_HEAD_OWNER


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Target and, when its own record could be read, the MTP part."""

    target: TargetManifest
    mtp: MtpManifest | None

    @property
    def num_checkpoint_mtp_layers(self) -> int:
        return len(self.mtp.mtp_layer_ids) if self.mtp else 0

    @property
    def fingerprint(self) -> str:
        """sha256 of the canonical JSON of the whole record."""
        return record_fingerprint(self)


def canonical_json(record: Any) -> str:
    """One text for one value: a dataclass (or plain value) as JSON with sorted keys and no spaces."""
    plain = asdict(record) if hasattr(record, "__dataclass_fields__") else record
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def record_fingerprint(record: Any) -> str:
    return hashlib.sha256(canonical_json(record).encode()).hexdigest()
