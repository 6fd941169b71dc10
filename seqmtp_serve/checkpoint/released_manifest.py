"""The record of MTP layers that come as released: in the target's own files, with no manifest beside them.

What no tensor shape reveals is then the family's (`model/mtp_families.py`); the rest is what `config.json` says of the
main layers, whose block the module repeats.
"""

from __future__ import annotations

from seqmtp_serve.checkpoint import names
from seqmtp_serve.checkpoint.family import contract_of
from seqmtp_serve.checkpoint.fingerprint import tensor_fingerprint
from seqmtp_serve.checkpoint.manifest import EMBEDDING_OWNER, MTP_HEAD_OWNERS
from seqmtp_serve.checkpoint.mtp_manifest import MtpManifest
from seqmtp_serve.checkpoint.parts import TargetPart
from seqmtp_serve.errors import CheckpointError, MtpIncomplete
from seqmtp_serve.model.mtp_families import FAMILIES

# model_type -> the row of the family table. GLM-4.7-Flash is GLM's module around a block of DeepSeek's.
_ROWS = {"deepseek_v3": "deepseek_v3", "glm4_moe_lite": "glm4_moe"}


def released_manifest(name: str, target: TargetPart) -> MtpManifest | None:
    """The record, or None when there is no MTP layer, by the configuration and by the files.

    Reads the norms before the head, a few kilobytes. Raises MtpIncomplete when configuration and files disagree about
    whether there is an MTP layer at all, and for a family whose contract is not known.
    """
    if target.num_mtp_layers is None:
        return None
    later, count = target.later_layers, target.num_mtp_layers
    if count == 0 and later:
        raise MtpIncomplete(f"num_nextn_predict_layers: declares no MTP layer, the files hold model.layers.{later[0]}")
    if count == 0:
        return None
    if target.family not in _ROWS:
        raise MtpIncomplete(
            f"model_type: what the MTP layers of {target.family!r} are fed is not known; write a manifest"
        )
    config, contract = target.config, contract_of(target.config)
    layers = tuple(range(config.num_layers, config.num_layers + count))
    declared = FAMILIES[_ROWS[target.family]].contract
    owner = "main" if _norms_are_the_main_one(target, layers) else declared.final_norm_owner
    prefixes = tuple(names.layer_prefix(layer) for layer in layers)
    dtypes = {spec.dtype for tensor, spec in target.source.specs.items() if tensor.startswith(prefixes)}
    return MtpManifest(
        target_checkpoint=name,
        target_sha256="",
        architecture=contract.architecture,
        num_main_layers=config.num_layers,
        num_checkpoint_mtp_layers=count,
        mtp_layer_ids=layers,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        draft_vocab_size=declared.draft_vocab_size,
        fusion_order=declared.fusion_order,
        norm_flavour=declared.norm_flavour,
        fed_hidden=declared.fed_hidden,
        recycled_hidden=declared.recycled_hidden,
        position0_zeroing=declared.zero_position0,
        final_norm_owner=owner,
        embedding_owner=EMBEDDING_OWNER,
        output_head_owner=MTP_HEAD_OWNERS[owner],
        requires_physical_training_aliases=True,
        rope=contract.rope,
        fingerprints=None,
        storage_dtype="+".join(sorted(dtypes)),
        compute_dtype="float32",
        cache_layout=contract.mtp_cache_layout,
        expert_layout=contract.expert_layout,
        quantization=target.quantization,
        source_commit="",
        tensor_fingerprints=(),
        training_json="{}",
        rollout=declared.rollout,
    )


def _norms_are_the_main_one(target: TargetPart, layers: tuple[int, ...]) -> bool:
    """Whether every module's own norm holds the main norm's values: then it is a copy, and the main one is used."""
    try:
        main = tensor_fingerprint(target.source.read(names.FINAL_NORM))
        own = [names.layer_prefix(layer) + names.SHARED_NORM for layer in layers]
        return all(tensor_fingerprint(target.source.read(name)) == main for name in own)
    except CheckpointError:
        return False  # a gate will name what is missing
