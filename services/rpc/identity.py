"""Names of workers: new at each start, so that whoever meets a restarted worker meets another one."""

from __future__ import annotations

import secrets

from seqmtp_serve.checkpoint.manifest import Fingerprints


def new_id(kind: str) -> str:
    """E.g. "target-5f0c2a9be1d4"."""
    return f"{kind}-{secrets.token_hex(6)}"


def output_head_fingerprint(fingerprints: Fingerprints) -> str:
    """Final norm and head together: what turns a hidden row into logits."""
    return f"{fingerprints.output_norm}+{fingerprints.head}"
