"""What an MTP manifest declares, against the target it would be served with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict

from seqmtp_serve.checkpoint import names
from seqmtp_serve.checkpoint.family import contract_of
from seqmtp_serve.checkpoint.fusion import FUSION_ORDERS
from seqmtp_serve.checkpoint.manifest import EMBEDDING_OWNER, MTP_HEAD_OWNERS, Fingerprints
from seqmtp_serve.checkpoint.mtp_manifest import MtpManifest
from seqmtp_serve.checkpoint.parts import MtpPart, TargetPart
from seqmtp_serve.checkpoint.problem import Problem, ProblemKind
from seqmtp_serve.model.deepseek_config import YarnConfig

_ONE_OF: Mapping[str, tuple[str, ...]] = {
    "fusion_order": FUSION_ORDERS,
    "norm_flavour": ("w", "1+w"),
    "fed_hidden": ("pre", "post"),
    "recycled_hidden": ("pre", "post"),
    "final_norm_owner": ("main", "mtp", "none"),
    "rollout": ("recurrent", "chain"),
}


def declaration_problems(part: MtpPart, target: TargetPart) -> Iterator[Problem]:
    """Fields that contradict the target, and fields whose value is none of the words there are."""
    manifest, config, contract = part.manifest, target.config, contract_of(target.config)
    num_layers, num_mtp = config.num_layers, max(len(manifest.mtp_layer_ids), 1)
    must_equal: dict[str, tuple[object, object]] = {
        "architecture": (manifest.architecture, contract.architecture),
        "num_main_layers": (manifest.num_main_layers, num_layers),
        "num_checkpoint_mtp_layers": (manifest.num_checkpoint_mtp_layers, num_mtp),
        "mtp_layer_ids": (manifest.mtp_layer_ids, tuple(range(num_layers, num_layers + num_mtp))),
        "vocab_size": (manifest.vocab_size, config.vocab_size),
        "hidden_size": (manifest.hidden_size, config.hidden_size),
        "embedding_owner": (manifest.embedding_owner, EMBEDDING_OWNER),
        "output_head_owner": (
            manifest.output_head_owner,
            MTP_HEAD_OWNERS.get(manifest.final_norm_owner, manifest.output_head_owner),
        ),
        "rope.theta": (manifest.rope.theta, contract.rope.theta),
        "rope.head_dim": (manifest.rope.head_dim, contract.rope.head_dim),
        "rope.layout": (manifest.rope.layout, contract.rope.layout),
        "rope.position": (manifest.rope.position, contract.rope.position),
        "expert_layout": (manifest.expert_layout, contract.expert_layout),
        "cache_layout": (manifest.cache_layout, contract.mtp_cache_layout),
    }
    must_equal |= _yarn(manifest.rope.yarn, contract.rope.yarn)
    if not part.own_files:
        must_equal["quantization"] = (manifest.quantization, target.quantization)
        if target.num_mtp_layers is not None:
            must_equal["num_nextn_predict_layers"] = (target.num_mtp_layers, num_mtp)
    for field, (declared, wanted) in must_equal.items():
        if declared != wanted:
            yield _declaration(field, f"declares {declared!r}, must be {wanted!r} for this target")
    for field, choices in _ONE_OF.items():
        if (word := getattr(manifest, field)) not in choices:
            yield _declaration(field, f"declares {word!r}; declare one of {', '.join(choices)}")
    if not 0 <= manifest.draft_vocab_size <= config.vocab_size:
        yield _declaration("draft_vocab_size", f"{manifest.draft_vocab_size} is outside 0..{config.vocab_size}")


def _yarn(declared: YarnConfig | None, wanted: YarnConfig | None) -> dict[str, tuple[object, object]]:
    """Field by field, when both scale positions."""
    if declared is None or wanted is None:
        return {"rope.yarn": (declared, wanted)}
    ours, theirs = asdict(declared), asdict(wanted)
    return {f"rope.yarn.{name}": (ours[name], theirs[name]) for name in ours}


def _declaration(field: str, detail: str) -> Problem:
    return Problem(kind=ProblemKind.DECLARATION, subject=field, detail=detail)


def fingerprint_problems(manifest: MtpManifest, target: Fingerprints) -> Iterator[Problem]:
    """Tensors of the target that are not those the module was made for."""
    declared = manifest.fingerprints
    if declared is None:
        return
    pairs = {
        names.EMBEDDING: (declared.embedding, target.embedding),
        names.FINAL_NORM: (declared.output_norm, target.output_norm),
        names.HEAD: (declared.head or target.embedding, target.head),
    }
    for name, (expected, actual) in pairs.items():
        if expected != actual:
            detail = f"the module was made for {expected[:12]}, the target holds {actual[:12]}"
            yield Problem(kind=ProblemKind.FINGERPRINT, subject=name, detail=detail)
