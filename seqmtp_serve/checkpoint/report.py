"""What a checkpoint is and what is wrong with it, as plain values (for JSON) and as text for a person."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from seqmtp_serve.checkpoint import names
from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.checkpoint.gates import Gate
from seqmtp_serve.checkpoint.manifest import canonical_json
from seqmtp_serve.checkpoint.tensor_source import TensorSource
from seqmtp_serve.errors import TargetIncomplete

_LAYER = re.compile(r"(?<=model\.layers\.)\d+(?=\.)")


def describe(checkpoint: Checkpoint, *, deep: bool = True) -> dict[str, Any]:
    """Both gates' verdicts, the record, aliases and every stored tensor. `deep` reads all values."""
    gates = checkpoint.gates(deep=deep)
    try:
        manifest = json.loads(canonical_json(checkpoint.manifest))
        fingerprint = checkpoint.manifest.fingerprint
    except TargetIncomplete:
        manifest, fingerprint = None, None
    return {
        "model": checkpoint.name,
        "fingerprint": fingerprint,
        "config": asdict(checkpoint.config),
        "mtp_config": asdict(checkpoint.mtp_config) if checkpoint.mtp_config else None,
        "eos_token_ids": list(checkpoint.eos_token_ids),
        "aliases": _aliases(checkpoint),
        "manifest": manifest,
        "target": _part(gates.target, checkpoint.target_source),
        "mtp": _part(gates.mtp, checkpoint.mtp_source) if gates.mtp else None,
    }


def as_text(found: Mapping[str, Any]) -> str:
    """`describe`'s values for a person: verdicts first, then declarations, then tensors with equal layers folded."""
    return "\n".join(_lines(found)) + "\n"


def _part(gate: Gate, source: TensorSource | None) -> dict[str, Any]:
    specs = source.specs if source else {}
    return {
        "ok": gate.ok,
        "problems": [asdict(problem) for problem in gate.problems],
        "tensors": [
            {"name": name, "shape": list(spec.shape), "dtype": spec.dtype, "file": spec.file.name}
            for name, spec in specs.items()
        ],
    }


def _aliases(checkpoint: Checkpoint) -> dict[str, str]:
    """Name -> the tensor of the main model that is used in its place."""
    aliases = {names.HEAD: names.EMBEDDING} if checkpoint.config.tie_word_embeddings else {}
    if checkpoint.mtp_config:
        head = aliases.get(names.HEAD, names.HEAD)
        aliases |= {"mtp.embed_tokens.weight": names.EMBEDDING, "mtp.shared_head.head.weight": head}
        if checkpoint.mtp_config.final_norm_owner == "main":
            aliases["mtp.shared_head.norm.weight"] = names.FINAL_NORM
    return aliases


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"model         {found['model']}"
    yield f"fingerprint   {found['fingerprint'] or 'none: the shared tensors cannot be read'}"
    yield from _verdict("target gate", found["target"])
    if found["mtp"] is None:
        yield "MTP gate      no MTP part: serves at depth 0"
    else:
        yield from _verdict("MTP gate", found["mtp"])
    for title, values in (("configuration", found["config"]), ("MTP adapter", found["mtp_config"])):
        if values:
            yield from ("", title, *(f"  {name:<22}{value}" for name, value in values.items()))
    if found["aliases"]:
        yield from ("", "aliases", *(f"  {name:<28} is {owner}" for name, owner in found["aliases"].items()))
    for title, part in (("target tensors", found["target"]), ("MTP tensors", found["mtp"])):
        if part and part["tensors"]:
            yield from ("", title, *_folded(part["tensors"]))


def _verdict(title: str, part: Mapping[str, Any]) -> Iterator[str]:
    yield f"{title:<14}" + ("passed" if part["ok"] else f"FAILED ({len(part['problems'])})")
    for problem in part["problems"]:
        yield f"  {problem['kind']:<12}{problem['subject']}: {problem['detail']}"


def _folded(tensors: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """One line for the same tensor of several layers: `model.layers.{0..29}.…`."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for tensor in tensors:
        layer = _LAYER.search(tensor["name"])
        key = (_LAYER.sub("{}", tensor["name"]), str(tensor["shape"]), tensor["dtype"])
        groups.setdefault(key, []).extend([int(layer[0])] if layer else [])
    for (name, shape, dtype), layers in groups.items():
        yield f"  {name.replace('{}', _span(sorted(layers))):<60} {shape:<15} {dtype}"


def _span(layers: list[int]) -> str:
    if len(layers) < 2:
        return "".join(map(str, layers))
    whole = layers == list(range(layers[0], layers[-1] + 1))
    return f"{{{layers[0]}..{layers[-1]}}}" if whole else "{" + ",".join(map(str, layers)) + "}"
