"""Where coordinators are: a fixed list, or what the registry says."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Protocol

from redis.asyncio import Redis

from seqmtp_serve.errors import StoreUnreachable
from services.gateway.coordinators import Worker
from services.registry import Registry

FRESH_S = 0.5
KINDS = ("target", "proposer", "coordinator")


class Directory(Protocol):
    """The addresses (`host:port`) to try, and every worker there is, as best known. Never raises."""

    async def addresses(self) -> Sequence[str]: ...

    async def workers(self) -> Sequence[Worker]: ...

    async def close(self) -> None: ...


class FixedDirectory:
    """Addresses given by hand."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.listed = tuple(addresses)

    async def addresses(self) -> Sequence[str]:
        """Those addresses."""
        return self.listed

    async def workers(self) -> Sequence[Worker]:
        """Those coordinators; of others nothing is known."""
        return [Worker(kind="coordinator", id=address) for address in self.listed]

    async def close(self) -> None:
        """Nothing is held."""


class RegistryDirectory:
    """Coordinators with a live lease, asked for at most twice a second. While the registry is away the last stand.

    One that is ending is listed only as long as there is no other.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._registry = Registry(redis)
        self._read_at = float("-inf")
        self._known: tuple[str, ...] = ()
        self._workers: list[Worker] = []

    async def addresses(self) -> Sequence[str]:
        """The latest answer."""
        if time.monotonic() - self._read_at > FRESH_S:
            self._read_at = time.monotonic()
            with contextlib.suppress(StoreUnreachable):
                peers = await self._registry.list("coordinator")
                staying = [peer for peer in peers if not peer.draining]
                self._known = tuple(peer.address for peer in staying or peers)
        return self._known

    async def workers(self) -> Sequence[Worker]:
        """Asked anew at each call: a board looks about once a second."""
        with contextlib.suppress(StoreUnreachable):
            found = [await self._registry.list(kind) for kind in KINDS]
            self._workers = [Worker(kind=peer.kind, id=peer.id) for peers in found for peer in peers]
        return self._workers

    async def close(self) -> None:
        """Close the connection to the registry."""
        await self._redis.aclose()
