"""What a checkpoint is and what is wrong with it, as plain values (for JSON) and as text for a person."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from seqmtp_serve.checkpoint import names
from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.checkpoint.family import contract_of
from seqmtp_serve.checkpoint.fp8 import SCALE_SUFFIX
from seqmtp_serve.checkpoint.gates import Gate
from seqmtp_serve.checkpoint.manifest import canonical_json
from seqmtp_serve.checkpoint.tensor_source import TensorSpec
from seqmtp_serve.errors import TargetIncomplete

_LAYER = re.compile(r"(?<=model\.layers\.)\d+(?=\.)")
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
_TITLES = {"config": "configuration", "contract": "contract", "mtp_config": "MTP adapter"}


def describe(checkpoint: Checkpoint, *, deep: bool = True) -> dict[str, Any]:
    """Both gates' verdicts, the record, aliases and every stored tensor. `deep` reads all values."""
    gates = checkpoint.gates(deep=deep)
    try:
        manifest = json.loads(canonical_json(checkpoint.manifest))
        fingerprint = checkpoint.manifest.fingerprint
    except TargetIncomplete:
        manifest, fingerprint = None, None
    contract = contract_of(checkpoint.config)
    mtp_layers = checkpoint.mtp_layer_names
    return {
        "model": checkpoint.name,
        "family": contract.architecture,
        "fingerprint": fingerprint,
        "config": asdict(checkpoint.config),
        "contract": asdict(contract) | {"quantization": checkpoint.quantization},
        "mtp_config": asdict(checkpoint.mtp_config) if checkpoint.mtp_config else None,
        "eos_token_ids": list(checkpoint.eos_token_ids),
        "aliases": _aliases(checkpoint),
        "manifest": manifest,
        "target": _part(gates.target, checkpoint.target_source.specs, lambda name: name not in mtp_layers),
        "mtp": _mtp_part(checkpoint, gates.mtp) if gates.mtp else None,
    }


def as_text(found: Mapping[str, Any]) -> str:
    """`describe`'s values for a person: verdicts first, then declarations, then tensors with equal layers folded."""
    return "\n".join(_lines(found)) + "\n"


def _mtp_part(checkpoint: Checkpoint, gate: Gate) -> dict[str, Any]:
    source, inside = checkpoint.mtp_source, checkpoint.mtp_layer_names
    specs = source.specs if source else {}
    return _part(gate, specs, lambda name: source is not checkpoint.target_source or name in inside)


def _part(gate: Gate, specs: Mapping[str, TensorSpec], is_own: Callable[[str], bool]) -> dict[str, Any]:
    own = {name: spec for name, spec in specs.items() if is_own(name)}
    return {
        "ok": gate.ok,
        "problems": [asdict(problem) for problem in gate.problems],
        "parameters": sum(spec.num_values for name, spec in own.items() if not name.endswith(SCALE_SUFFIX)),
        "tensors": [
            {"name": name, "shape": list(spec.shape), "dtype": spec.dtype, "file": spec.file.name}
            for name, spec in own.items()
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
    yield f"model         {found['model']} ({found['family']})"
    yield f"fingerprint   {found['fingerprint'] or 'none: the shared tensors cannot be read'}"
    yield from _verdict("target gate", found["target"])
    if found["mtp"] is None:
        yield "MTP gate      no MTP part: serves at depth 0"
    else:
        yield from _verdict("MTP gate", found["mtp"])
    for title in ("config", "contract", "mtp_config"):
        if values := found[title]:
            yield from ("", _TITLES[title], *(f"  {name:<28}{value}" for name, value in _flat(values)))
    if found["aliases"]:
        yield from ("", "aliases", *(f"  {name:<28} is {owner}" for name, owner in found["aliases"].items()))
    for title, part in (("target tensors", found["target"]), ("MTP tensors", found["mtp"])):
        if part and part["tensors"]:
            yield from ("", title, *_folded(part["tensors"]))


def _verdict(title: str, part: Mapping[str, Any]) -> Iterator[str]:
    verdict = "passed" if part["ok"] else f"FAILED ({len(part['problems'])})"
    yield f"{title:<14}{verdict}, {part['parameters']:,} parameters stored"
    for problem in part["problems"]:
        yield f"  {problem['kind']:<12}{problem['subject']}: {problem['detail']}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _folded(tensors: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """One line for the same tensor of several layers and experts: `model.layers.{3..60}.mlp.experts.{0..255}.…`."""
    groups: dict[tuple[str, str, str], tuple[set[int], set[int]]] = {}
    for tensor in tensors:
        name, shape, dtype = tensor["name"], str(tensor["shape"]), tensor["dtype"]
        layer, expert = _LAYER.search(name), _EXPERT.search(name)
        key = (_EXPERT.sub("{experts}", _LAYER.sub("{layers}", name)), shape, dtype)
        layers, experts = groups.setdefault(key, (set(), set()))
        layers.update([int(layer[0])] if layer else [])
        experts.update([int(expert[0])] if expert else [])
    for (name, shape, dtype), (layers, experts) in groups.items():
        name = name.replace("{layers}", _span(sorted(layers))).replace("{experts}", _span(sorted(experts)))
        yield f"  {name:<60} {shape:<15} {dtype}"


def _span(layers: list[int]) -> str:
    if len(layers) < 2:
        return "".join(map(str, layers))
    whole = layers == list(range(layers[0], layers[-1] + 1))
    return f"{{{layers[0]}..{layers[-1]}}}" if whole else "{" + ",".join(map(str, layers)) + "}"
