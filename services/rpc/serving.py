"""What every worker process does around its own work: registry, port, announcement, and one way to stop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

import grpc

from seqmtp_serve.errors import InternalError, InvalidField
from seqmtp_serve.tasks import end_tasks
from services.registry import Announcement, Meta, Registry
from services.rpc.channel import bind
from services.settings import Settings
from services.store.connection import connect

STOP_GRACE_S = 1.0  # calls under way may end by themselves for this long
LOOK_S = 0.02  # how often a worker that drains looks whether it has


@contextlib.asynccontextmanager
async def open_registry(settings: Settings) -> AsyncIterator[Registry]:
    """The registry on the store's server. Raises InvalidField if no server is named."""
    redis = connect(
        store_url(settings),
        password=settings.store.resolved_password(),
        socket_timeout_s=settings.store.socket_timeout_s,
    )
    try:
        yield Registry(redis)
    finally:
        await redis.aclose()


def store_url(settings: Settings) -> str:
    """The store's address; a worker starts no store of its own."""
    if settings.store.url is None:
        raise InvalidField("a worker needs the store's address: give --redis-url", param="store.url")
    return settings.store.url


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """A worker as its peers see it: the address told to them, and the entry they find it by."""

    address: str
    announcement: Announcement


@contextlib.asynccontextmanager
async def served(
    server: grpc.aio.Server,
    registry: Registry,
    settings: Settings,
    *,
    kind: str,
    id: str,
    port: int,
    meta: Callable[[], Meta] = dict,
    grace_s: float = STOP_GRACE_S,
) -> AsyncIterator[Presence]:
    """Serve and announce while the block runs. Peers find it only while it serves."""
    bound = bind(server, settings.rpc.host, port)
    address = f"{settings.rpc.public_host}:{bound.rpartition(':')[2]}"
    await server.start()
    try:
        async with registry.announce(
            kind, id, address, meta, ttl_s=settings.registry.ttl_s, period_s=settings.registry.period_s
        ) as announcement:
            yield Presence(address=address, announcement=announcement)
    finally:
        await server.stop(grace_s)


async def until_stopped(
    stop: asyncio.Event, *work: Coroutine[Any, Any, Any], drain: Callable[[], Coroutine[Any, Any, None]] | None = None
) -> None:
    """Run `work` until `stop` is set, then through `drain`; it is cancelled then. Raises what a piece of work raised,
    as soon as it did.

    Work that just ends is InternalError: each piece is meant to run as long as its process.
    """
    running = [asyncio.create_task(piece) for piece in work]
    try:
        await _unless_one_ends(stop.wait(), running)
        if drain is not None:
            await _unless_one_ends(drain(), running)
    finally:
        await end_tasks(*running)


async def _unless_one_ends(what: Coroutine[Any, Any, Any], running: Iterable[asyncio.Task[Any]]) -> None:
    waiting = asyncio.create_task(what)
    try:
        done, _ = await asyncio.wait([waiting, *running], return_when=asyncio.FIRST_COMPLETED)
        for task in done - {waiting}:
            task.result()
            raise InternalError(f"{task.get_coro()} ended by itself")
        waiting.result()
    finally:
        await end_tasks(waiting)


async def at_most(seconds: float, over: Callable[[], bool]) -> None:
    """Until `over()`, no longer than that."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not over():
                await asyncio.sleep(LOOK_S)
