"""`manifest.json` beside an MTP module: what no tensor shape reveals, declared by whoever made the weights.

The file is one JSON object with the fields of `MtpManifest`; `rope` and `fingerprints` are objects of their own and
`training` is a free-form record of how the weights came to be. A field that is missing, unknown or of another type is
a reason for the MTP gate to fail, by name; nothing is guessed or given a default.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, Field, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from seqmtp_serve.errors import MtpIncomplete
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.deepseek_config import YarnConfig

MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeContract:
    """Rotary position embedding. `position` of an MTP row: its `base` i, or `base+1`. `layout` names the rotated pairs:
    (x_j, x_{j+D/2}) for `rotate_half`, neighbours for `interleaved`. `yarn` null: no scaling of positions.
    """

    theta: float
    head_dim: int
    layout: str = "rotate_half"
    position: str = "base"
    yarn: YarnConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFingerprints:
    """Fingerprints of the target tensors the module was trained against; `head` is null for a tied head."""

    embedding: str
    output_norm: str
    head: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpManifest:
    """The declarations of an MTP part.

    `target_sha256` is the digest of the target file the module was fitted to (informative: what must agree are the
    fingerprints). `tensor_fingerprints` pairs a tensor of the module with its digest (in the file: an object); a column
    swap or a flipped bit changes no shape, so this is what shows it. `fusion_fingerprints` are those of each `eh_proj`
    turned to [hidden; embedding] by the declared order, so that a wrong declaration shows as well.
    `draft_vocab_size` 0 means the whole vocabulary.
    `compute_dtype` is that of fusion, block and head. `training_json` is `training` as canonical JSON, so that the
    record hashes. `fingerprints` is None only for layers that lie in the target's own files (`released_manifest.py`).
    """

    target_checkpoint: str
    target_sha256: str
    architecture: str
    num_main_layers: int
    num_checkpoint_mtp_layers: int
    mtp_layer_ids: tuple[int, ...]
    vocab_size: int
    hidden_size: int
    draft_vocab_size: int
    fusion_order: str
    norm_flavour: str
    fed_hidden: str
    recycled_hidden: str
    position0_zeroing: bool
    final_norm_owner: str
    embedding_owner: str
    output_head_owner: str
    requires_physical_training_aliases: bool
    rope: RopeContract
    fingerprints: SharedFingerprints | None
    storage_dtype: str
    compute_dtype: str
    cache_layout: str
    expert_layout: str
    quantization: str
    source_commit: str
    tensor_fingerprints: tuple[tuple[str, str], ...]
    training_json: str
    fusion_fingerprints: tuple[tuple[str, str], ...] = ()
    rollout: str = "recurrent"

    def config(self) -> MtpConfig:
        """The part of the record a module is built from. Call after the gate: literals are not checked again."""
        return MtpConfig(
            num_modules=len(self.mtp_layer_ids),
            fusion_order=self.fusion_order,  # type: ignore[arg-type]
            norm_flavour=self.norm_flavour,  # type: ignore[arg-type]
            fed_hidden=self.fed_hidden,  # type: ignore[arg-type]
            recycled_hidden=self.recycled_hidden,  # type: ignore[arg-type]
            zero_position0=self.position0_zeroing,
            final_norm_owner=self.final_norm_owner,  # type: ignore[arg-type]
            draft_vocab_size=self.draft_vocab_size,
            rollout=self.rollout,  # type: ignore[arg-type]
        )


def manifest_json(manifest: MtpManifest) -> dict[str, Any]:
    """The record as `parse_mtp_manifest` reads it."""
    found = asdict(manifest)
    found["training"] = json.loads(found.pop("training_json"))
    return found | {name: dict(found[name]) for name in ("tensor_fingerprints", "fusion_fingerprints")}


def write_mtp_manifest(folder: Path, manifest: MtpManifest) -> None:
    """Write `folder/manifest.json`."""
    text = json.dumps(manifest_json(manifest), indent=2, ensure_ascii=False) + "\n"
    (folder / MANIFEST_FILE).write_text(text, encoding="utf-8")


def read_mtp_manifest(folder: Path) -> MtpManifest:
    """Read `folder/manifest.json`. Raises MtpIncomplete naming the file or the field."""
    path = folder / MANIFEST_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise MtpIncomplete(f"{path}: no readable manifest ({fault})") from fault
    return parse_mtp_manifest(found)


def parse_mtp_manifest(found: Any) -> MtpManifest:
    """A decoded `manifest.json` as a record. Raises MtpIncomplete naming the first field that is not as declared."""
    if not isinstance(found, dict):
        raise MtpIncomplete("manifest: must be a JSON object")
    values = dict(found)
    training = values.pop("training", None)
    if not isinstance(training, dict):
        raise MtpIncomplete("training: the manifest must say how the weights were made")
    values["training_json"] = json.dumps(training, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    rope = values.get("rope")
    if isinstance(rope, dict) and isinstance(rope.get("yarn"), dict):
        rope = rope | {"yarn": _record(YarnConfig, rope["yarn"], "rope.yarn.")}
    values["rope"] = _record(RopeContract, rope, "rope.")
    values["fingerprints"] = _record(SharedFingerprints, values.get("fingerprints"), "fingerprints.")
    if isinstance(values.get("mtp_layer_ids"), list):
        values["mtp_layer_ids"] = tuple(values["mtp_layer_ids"])
    for name in ("tensor_fingerprints", "fusion_fingerprints"):
        if isinstance(values.get(name), dict):
            values[name] = tuple(sorted(values[name].items()))
    record: MtpManifest = _record(MtpManifest, values, "")
    return record


def _pair_of_text(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, str) for part in value)


_ACCEPTS: dict[str, Callable[[Any], bool]] = {  # annotation -> does a decoded JSON value fit it
    "str": lambda value: isinstance(value, str),
    "str | None": lambda value: value is None or isinstance(value, str),
    "int": lambda value: type(value) is int,
    "float": lambda value: type(value) in (int, float),
    "bool": lambda value: type(value) is bool,
    "tuple[int, ...]": lambda value: isinstance(value, tuple) and all(type(item) is int for item in value),
    "tuple[tuple[str, str], ...]": lambda value: isinstance(value, tuple) and all(map(_pair_of_text, value)),
    "YarnConfig | None": lambda value: value is None or isinstance(value, YarnConfig),
    "RopeContract": lambda value: isinstance(value, RopeContract),
    "SharedFingerprints | None": lambda value: isinstance(value, SharedFingerprints),
}


def _record(kind: type, values: Any, prefix: str) -> Any:
    if not isinstance(values, dict):
        raise MtpIncomplete(f"{prefix.rstrip('.')}: must be a JSON object")
    known = {field.name: field for field in fields(kind)}
    for name in values.keys() - known.keys():
        raise MtpIncomplete(f"{prefix}{name}: unknown field")
    for name, field in known.items():
        _check(field, values, f"{prefix}{name}")
    return kind(**values)


def _check(field: Field[Any], values: dict[str, Any], label: str) -> None:
    if field.name not in values:
        if field.default is MISSING:
            raise MtpIncomplete(f"{label}: not declared")
        return
    value = values[field.name]
    if not _ACCEPTS[str(field.type)](value):
        raise MtpIncomplete(f"{label}: must be {field.type}, is {value!r}")
