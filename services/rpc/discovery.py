"""Addresses of live workers of a kind, each reader's favourite first.

The order is a rendezvous hash of (reader, worker): readers spread over the workers, agree with themselves from one
look to the next, and move only when their own favourite is gone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence

from services.registry import Registry

Discover = Callable[[], Awaitable[Sequence[str]]]


def favourites(reader: str, workers: dict[str, str]) -> list[str]:
    """Addresses of `workers` (id -> address), the reader's favourite first."""
    return [workers[worker] for worker in sorted(workers, key=lambda worker: _weight(reader, worker), reverse=True)]


def discover(registry: Registry, kind: str, reader: str) -> Discover:
    """A look-up to be repeated at will. It raises StoreUnreachable while the registry's server is away."""

    async def look() -> Sequence[str]:
        return favourites(reader, {peer.id: peer.address for peer in await registry.list(kind)})

    return look


def _weight(reader: str, worker: str) -> bytes:
    return hashlib.blake2b(f"{reader}\x1f{worker}".encode(), digest_size=8).digest()
