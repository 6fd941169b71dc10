"""Seal an MTP part: record what its values are, so that a later change of any of them shows.

Released checkpoints declare nothing and carry no digest: values that went wrong but stayed finite, or a fusion in the
other order, then show only as drafts that are rejected. A sealed part fails its gate instead, by name.
"""

from __future__ import annotations

from dataclasses import replace

from seqmtp_serve.checkpoint import family, names
from seqmtp_serve.checkpoint.block_scaled_source import scale_shapes
from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.checkpoint.fingerprint import tensor_fingerprint
from seqmtp_serve.checkpoint.fp8 import format_of_record
from seqmtp_serve.checkpoint.fusion import projection_for_he
from seqmtp_serve.checkpoint.mtp_manifest import MtpManifest, SharedFingerprints
from seqmtp_serve.errors import MtpIncomplete


def sealed(checkpoint: Checkpoint) -> MtpManifest:
    """The MTP part's record with a fingerprint of everything it depends on. Reads every tensor of the module.

    Copies of shared tensors are not recorded: they must equal their owners, whatever those are. Raises MtpIncomplete
    when there is no MTP part, or when it does not pass its gate as it is.
    """
    gate, record, source = checkpoint.gates().mtp, checkpoint.manifest, checkpoint.mtp_source
    if gate is None:
        raise MtpIncomplete(f"{checkpoint.name}: has no MTP part to seal")
    gate.require()
    assert record.mtp is not None, "the gate passed"
    assert source is not None, "the gate passed"
    mtp, shared = record.mtp, record.target.fingerprints
    prefixes = [names.layer_prefix(layer) for layer in mtp.mtp_layer_ids]
    own = [prefix + name for prefix in prefixes for name in family.mtp_layer_shapes(checkpoint.config, mtp.config())]
    own += scale_shapes(source.specs, own, format_of_record(mtp.quantization))
    fused = {prefix + names.EH_PROJ: source.read(prefix + names.EH_PROJ) for prefix in prefixes}
    turned = {name: projection_for_he(stored, mtp.hidden_size, mtp.fusion_order) for name, stored in fused.items()}
    return replace(
        mtp,
        storage_dtype="+".join(sorted({source.specs[name].dtype for name in own})),
        target_sha256=record.target.source_digest,
        fingerprints=SharedFingerprints(
            embedding=shared.embedding,
            output_norm=shared.output_norm,
            head=None if record.target.tied_head else shared.head,
        ),
        tensor_fingerprints=tuple(sorted((name, tensor_fingerprint(source.read(name))) for name in own)),
        fusion_fingerprints=tuple(sorted((name, tensor_fingerprint(tensor)) for name, tensor in turned.items())),
    )
