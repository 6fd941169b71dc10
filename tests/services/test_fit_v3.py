"""The handshake for a released DeepSeek-V3 layout: a proposer of another checkpoint does not fit its target."""

from __future__ import annotations

from pathlib import Path

import pytest

from seqmtp_serve.checkpoint import names
from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.checkpoint.open import open_checkpoint
from services.rpc.identity import output_head_fingerprint
from services.rpc.wire import proposer
from services.target.fit import judge
from tests.unit.released_files import write_tiny_v3


def info(checkpoint: Checkpoint) -> proposer.ProposerInfo:
    """What a proposer of `checkpoint` says of itself."""
    shared = checkpoint.manifest.target.fingerprints
    return proposer.ProposerInfo(
        proposer_id="proposer-1",
        model=checkpoint.name,
        hidden_size=checkpoint.config.hidden_size,
        embedding_fingerprint=shared.embedding,
        output_head_fingerprint=output_head_fingerprint(shared),
    )


@pytest.mark.covers(49, 136)
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (names.EMBEDDING, "another embedding"),
        (names.FINAL_NORM, "another final norm and head"),
        (names.HEAD, "another final norm and head"),
        ("model.layers.0.input_layernorm.weight", None),
    ],
)
def test_shared_tensors_are_compared_by_value(tmp_path: Path, changed: str, words: str | None) -> None:
    own = write_tiny_v3(tmp_path / "v3")
    other = write_tiny_v3(tmp_path / "other" / "v3")
    other.edit(**{changed: other.tensors[changed] + 0.25})
    fits = judge(open_checkpoint(str(own.folder)))
    assert fits(info(open_checkpoint(str(own.folder)))) is None
    reason = fits(info(open_checkpoint(str(other.folder))))
    assert (reason is None) if words is None else (reason is not None and words in reason)
