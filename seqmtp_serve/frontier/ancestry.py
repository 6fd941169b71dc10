"""The ancestry digest: equal length is not equal ancestry.

digest(0) covers the prompt, digest(v+1) = H(digest(v), tokens of row v+1). Two states agree on a digest only if they
agree on the prompt, on every committed token and on where each row ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from struct import pack

DIGEST_LEN = 16  # bytes
_PERSON = b"seqmtp.ancestry"  # keeps these digests apart from every other blake2b in a deployment


def initial_digest(prompt_ids: Sequence[int]) -> bytes:
    """The digest at version 0."""
    return extend_digest(bytes(DIGEST_LEN), prompt_ids)


def extend_digest(digest: bytes, tokens: Sequence[int]) -> bytes:
    """The digest after one more row. Tokens are hashed as little-endian uint32."""
    return blake2b(digest + pack(f"<{len(tokens)}I", *tokens), digest_size=DIGEST_LEN, person=_PERSON).digest()


def digest_of(prompt_ids: Sequence[int], rows: Iterable[Sequence[int]]) -> bytes:
    """The digest after all of `rows`, from nothing."""
    digest = initial_digest(prompt_ids)
    for tokens in rows:
        digest = extend_digest(digest, tokens)
    return digest
