"""Whether a proposer fits this target: same model, same read-only replicas of what the two share."""

from __future__ import annotations

from collections.abc import Callable

from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from services.rpc.identity import output_head_fingerprint
from services.rpc.wire import proposer


def judge(checkpoint: Checkpoint) -> Callable[[proposer.ProposerInfo], str | None]:
    """A function that says, in a sentence, why a proposer must not be used; None: it fits.

    A proposer with another embedding or head would still be exact, only useless: its drafts would be rejected. One
    with another hidden size could not be fed at all.
    """
    shared = checkpoint.manifest.target.fingerprints
    expected: tuple[tuple[str, str, object], ...] = (
        ("model", "model", checkpoint.name),
        ("hidden_size", "hidden size", checkpoint.config.hidden_size),
        ("embedding_fingerprint", "embedding", shared.embedding),
        ("output_head_fingerprint", "final norm and head", output_head_fingerprint(shared)),
    )

    def reason(info: proposer.ProposerInfo) -> str | None:
        for field, words, own in expected:
            if (theirs := getattr(info, field)) != own:
                return f"{info.proposer_id} has another {words}: {str(theirs)[:80]}, not {str(own)[:80]}"
        return None

    return reason
