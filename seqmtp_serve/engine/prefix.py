"""The names under which full pages are shared: one key a page, of everything that its rows were computed from.

A row is a function of the tokens up to it, so the key of page i is a hash of the key of page i - 1 and the tokens of
page i. Two texts that differ anywhere before the page's end have different keys.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from seqmtp_serve.engine.pages import Lease, PagePool
from seqmtp_serve.engine.sequences import TargetSequence

ROOT = b""


def page_keys(tokens: Sequence[int], page_size: int, after: Sequence[bytes] = ()) -> list[bytes]:
    """The 16-byte keys of the full pages of `tokens`, those that follow the pages whose keys are `after`."""
    keys = []
    key = after[-1] if after else ROOT
    for start in range(len(after) * page_size, len(tokens) - page_size + 1, page_size):
        page = array("I", tokens[start : start + page_size])
        key = blake2b(key + page.tobytes(), digest_size=16).digest()
        keys.append(key)
    return keys


def share_prefix(pool: PagePool, lease: Lease, tokens: Sequence[int]) -> list[bytes]:
    """Give a new lease the published pages of `tokens`; returns their keys."""
    keys = page_keys(tokens, pool.page_size)
    return keys[: pool.share(lease, keys)]


def publish_prefix(pool: PagePool, sequence: TargetSequence) -> None:
    """Let texts that start alike share the pages that are full of canonical rows by now."""
    if sequence.length < (len(sequence.page_keys) + 1) * pool.page_size:
        return
    for key in page_keys(sequence.tokens[: sequence.length], pool.page_size, sequence.page_keys):
        pool.publish(sequence.lease, len(sequence.page_keys), key)
        sequence.page_keys.append(key)
