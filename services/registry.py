"""Who is here: each worker keeps a leased entry in the store's server, and peers find it by kind.

Works with or without Ray. One key a worker, which expires by itself; one set a kind, from which a reader drops names
whose key is gone. An entry's id is new at each start of its worker, so a reader sees a restart as another peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field

from redis.asyncio import Redis

from seqmtp_serve.errors import StoreUnreachable
from seqmtp_serve.tasks import end_tasks
from services.store.connection import TRANSIENT

log = logging.getLogger(__name__)

Meta = Mapping[str, str]
DRAINING = "draining"  # a key of `meta`


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One live worker. `meta` holds what its kind tells: fingerprints, capacity, model, epoch."""

    kind: str
    id: str
    address: str  # host:port
    meta: Meta = field(default_factory=dict)

    @property
    def draining(self) -> bool:
        """Whether it says that it is ending: it finishes what it has, and takes nothing new."""
        return DRAINING in self.meta


class Registry:
    """Reads and writes the entries. Every method raises StoreUnreachable when the server does not answer."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    @property
    def redis(self) -> Redis:
        """The connection, for what else lies on the server."""
        return self._redis

    async def register(self, kind: str, id: str, address: str, meta: Meta | None = None, ttl_s: float = 3.0) -> None:
        """Write or renew an entry: it is gone `ttl_s` after the last call."""
        value = json.dumps({"address": address, "meta": dict(meta or {})})
        with _reachable():
            async with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.set(_entry(kind, id), value, px=max(1, round(1000 * ttl_s)))
                pipeline.sadd(_names(kind), id)
                await pipeline.execute()

    async def list(self, kind: str) -> tuple[Peer, ...]:
        """Live workers of a kind, by id."""
        with _reachable():
            names = sorted(_text(name) for name in await self._redis.smembers(_names(kind)))
            if not names:
                return ()
            values = await self._redis.mget([_entry(kind, name) for name in names])
            if gone := [name for name, value in zip(names, values, strict=True) if value is None]:
                await self._redis.srem(_names(kind), *gone)  # a slow worker's next beat adds it again
        found = {name: json.loads(value) for name, value in zip(names, values, strict=True) if value is not None}
        return tuple(
            Peer(kind=kind, id=name, address=data["address"], meta=data["meta"]) for name, data in found.items()
        )

    async def remove(self, kind: str, id: str) -> None:
        """Say goodbye: readers need not wait for the lease to lapse."""
        with _reachable():
            async with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.delete(_entry(kind, id))
                pipeline.srem(_names(kind), id)
                await pipeline.execute()

    @contextlib.asynccontextmanager
    async def announce(
        self,
        kind: str,
        id: str,
        address: str,
        meta: Callable[[], Meta] = dict,
        *,
        ttl_s: float = 3.0,
        period_s: float = 1.0,
    ) -> AsyncIterator[Announcement]:
        """Keep an entry alive while the block runs; `meta` is asked anew for each beat.

        The first beat is written before the block is entered, if the store answers; a store that is away is waited for.
        """

        async def write() -> None:
            try:
                await self.register(kind, id, address, meta(), ttl_s)
            except StoreUnreachable as error:
                log.warning("%s %s cannot renew its entry: %s", kind, id, error)

        announcement = Announcement(write, lambda: self.remove(kind, id), period_s)
        await announcement.beat()
        try:
            yield announcement
        finally:
            await announcement.withdraw()

    async def watch(self, kind: str, period_s: float = 1.0) -> AsyncIterator[tuple[Peer, ...]]:
        """Yield the live workers now and whenever they change. While the store is away nothing changes."""
        seen: tuple[Peer, ...] | None = None
        while True:
            with contextlib.suppress(StoreUnreachable):
                now = await self.list(kind)
                if now != seen:
                    seen = now
                    yield now
            await asyncio.sleep(period_s)


class Announcement:
    """One worker's own entry, for as long as it is kept."""

    def __init__(self, write: Callable[[], Awaitable[None]], remove: Callable[[], Awaitable[None]], period_s: float):
        self.beat = write  # now, not at the next turn: for news that others should not wait for
        self._remove = remove
        self._beating = asyncio.create_task(self._beats(period_s))

    async def withdraw(self) -> None:
        """Say goodbye, and beat no more. What is connected may stay so. A second call does nothing."""
        if self._beating.done():
            return
        await end_tasks(self._beating)
        with contextlib.suppress(StoreUnreachable):
            await self._remove()

    async def _beats(self, period_s: float) -> None:
        while True:
            await asyncio.sleep(period_s)
            await self.beat()


def _entry(kind: str, id: str) -> str:
    return f"seqmtp:registry:{{{kind}}}:{id}"


def _names(kind: str) -> str:
    return f"seqmtp:registry:{{{kind}}}"


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name


@contextlib.contextmanager
def _reachable() -> Iterator[None]:
    try:
        yield
    except TRANSIENT as error:
        raise StoreUnreachable(f"the registry's server does not answer: {error}") from error
