"""What every worker process does around its own work: registry, port, announcement, and one way to stop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc

from seqmtp_serve.errors import InternalError, InvalidField
from services.registry import Meta, Registry
from services.rpc.channel import bind
from services.settings import Settings
from services.store.connection import connect

STOP_GRACE_S = 1.0  # calls under way may end by themselves for this long


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
) -> AsyncIterator[str]:
    """Serve and announce while the block runs; yields the address told to peers. Peers find it only while it serves."""
    bound = bind(server, settings.rpc.host, port)
    address = f"{settings.rpc.public_host}:{bound.rpartition(':')[2]}"
    await server.start()
    try:
        async with registry.announce(
            kind, id, address, meta, ttl_s=settings.registry.ttl_s, period_s=settings.registry.period_s
        ):
            yield address
    finally:
        await server.stop(STOP_GRACE_S)


async def until_stopped(stop: asyncio.Event, *work: Coroutine[Any, Any, Any]) -> None:
    """Run `work` until `stop` is set; it is cancelled then. Raises what a piece of work raised, as soon as it did.

    Work that just ends is InternalError: each piece is meant to run as long as its process.
    """
    stopping = asyncio.create_task(stop.wait())
    running = [asyncio.create_task(piece) for piece in work]
    try:
        done, _ = await asyncio.wait([stopping, *running], return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stopping}:
            task.result()
            raise InternalError(f"{task.get_coro()} ended by itself")
    finally:
        for task in (stopping, *running):
            task.cancel()
        await asyncio.gather(stopping, *running, return_exceptions=True)
