"""What an MTP manifest declares, against the target it would be served with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from seqmtp_serve.checkpoint import names
from seqmtp_serve.checkpoint.fusion import FUSION_ORDERS
from seqmtp_serve.checkpoint.manifest import EMBEDDING_OWNER, OUTPUT_HEAD_OWNER, Fingerprints
from seqmtp_serve.checkpoint.mtp_manifest import MtpManifest
from seqmtp_serve.checkpoint.problem import Problem, ProblemKind
from seqmtp_serve.model.config import LlamaConfig


def declaration_problems(manifest: MtpManifest, config: LlamaConfig) -> Iterator[Problem]:
    num_layers, num_mtp = config.num_layers, max(len(manifest.mtp_layer_ids), 1)
    must_equal: Mapping[str, tuple[object, object]] = {
        "architecture": (manifest.architecture, "llama"),
        "num_main_layers": (manifest.num_main_layers, num_layers),
        "num_checkpoint_mtp_layers": (manifest.num_checkpoint_mtp_layers, num_mtp),
        "mtp_layer_ids": (manifest.mtp_layer_ids, tuple(range(num_layers, num_layers + num_mtp))),
        "vocab_size": (manifest.vocab_size, config.vocab_size),
        "hidden_size": (manifest.hidden_size, config.hidden_size),
        "embedding_owner": (manifest.embedding_owner, EMBEDDING_OWNER),
        "output_head_owner": (manifest.output_head_owner, OUTPUT_HEAD_OWNER),
        "rope.theta": (manifest.rope.theta, config.rope_theta),
        "rope.head_dim": (manifest.rope.head_dim, config.head_dim),
        "rope.layout": (manifest.rope.layout, "rotate_half"),
        "rope.position": (manifest.rope.position, "base"),
        "expert_layout": (manifest.expert_layout, "dense"),
        "quantization": (manifest.quantization, "none"),
    }
    one_of: Mapping[str, tuple[object, tuple[str, ...]]] = {
        "fusion_order": (manifest.fusion_order, FUSION_ORDERS),
        "norm_flavour": (manifest.norm_flavour, ("w", "1+w")),
        "fed_hidden": (manifest.fed_hidden, ("pre", "post")),
        "recycled_hidden": (manifest.recycled_hidden, ("pre", "post")),
        "final_norm_owner": (manifest.final_norm_owner, ("main", "mtp", "none")),
    }
    for field, (declared, wanted) in must_equal.items():
        if declared != wanted:
            yield _declaration(field, f"declares {declared!r}, must be {wanted!r} for this target")
    for field, (declared, choices) in one_of.items():
        if declared not in choices:
            yield _declaration(field, f"declares {declared!r}; declare one of {', '.join(choices)}")
    if not 0 <= manifest.draft_vocab_size <= config.vocab_size:
        yield _declaration("draft_vocab_size", f"{manifest.draft_vocab_size} is outside 0..{config.vocab_size}")


def _declaration(field: str, detail: str) -> Problem:
    return Problem(kind=ProblemKind.DECLARATION, subject=field, detail=detail)


def fingerprint_problems(manifest: MtpManifest, target: Fingerprints) -> Iterator[Problem]:
    declared = manifest.fingerprints
    pairs = {
        names.EMBEDDING: (declared.embedding, target.embedding),
        names.FINAL_NORM: (declared.output_norm, target.output_norm),
        names.HEAD: (declared.head or target.embedding, target.head),
    }
    for name, (expected, actual) in pairs.items():
        if expected != actual:
            detail = f"the module was made for {expected[:12]}, the target holds {actual[:12]}"
            yield Problem(kind=ProblemKind.FINGERPRINT, subject=name, detail=detail)
