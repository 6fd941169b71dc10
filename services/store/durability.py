"""The three durability classes, and the check that a server can keep the one it is asked for.

| class | an acknowledged row survives | needs |
|---|---|---|
| C1 | a crash of any process, the store's included | `appendonly yes`, `appendfsync no` or `always` |
| C2 | a crash of the host | `appendfsync always` |
| C3 | the loss of the primary | `WAIT`: so many replicas hold the row before it is published |

Under C1 the kernel writes to disk when it likes: what it has not written yet (up to about half a minute) is lost when
the host itself goes down. A server with `appendfsync everysec` is accepted for C1, but may hold a write back for up to
two seconds while an fsync is slow, and lose it when it is killed then. C3 is not consensus: a fail-over that
promotes a replica outside the acknowledging ones can still lose rows.
"""

from __future__ import annotations

from typing import Literal

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from seqmtp_serve.errors import StoreError, StoreUnreachable
from services.store.connection import TRANSIENT

Durability = Literal["C1", "C2", "C3"]


async def require(redis: Redis, durability: Durability) -> None:
    """Raises StoreError if the server is set up for less, StoreUnreachable if it does not answer.

    A server that forbids CONFIG (managed ones do) is taken at its operator's word.
    """
    try:
        config = await redis.config_get("append*")
    except ResponseError:
        return
    except TRANSIENT as error:
        raise StoreUnreachable(f"the store does not answer: {error}") from error
    named = {_text(key): _text(value) for key, value in config.items()}
    if named.get("appendonly") != "yes" and durability != "C3":
        raise StoreError(f"durability {durability} needs a store with `appendonly yes`")
    if named.get("appendfsync") != "always" and durability == "C2":
        raise StoreError("durability C2 needs a store with `appendfsync always`")


def _text(value: bytes | str | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""
