"""The gateway as one process, or inside one Ray Serve replica: `run(settings, stop)`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence

import uvicorn
from fastapi import FastAPI

from seqmtp_serve.errors import NotReady
from services.gateway.app import create_app
from services.gateway.directory import ListedDirectory
from services.gateway.grpc_coordinators import GrpcCoordinators
from services.gateway.text_model import TextModel, open_text_model
from services.registry import Registry
from services.settings import Settings
from services.store.connection import connect

LOGGER = logging.getLogger("seqmtp.gateway")


def build_app(settings: Settings, text: TextModel | None = None) -> FastAPI:
    """The application over the real services, found through the registry. Connections are made at first use."""
    store = settings.store
    if store.url is None:
        raise NotReady("The gateway finds coordinators through the store: give --redis-url.")
    redis = connect(store.url, password=store.resolved_password(), socket_timeout_s=store.socket_timeout_s)
    registry = Registry(redis)

    async def listing() -> Sequence[str]:
        return [peer.address for peer in await registry.list("coordinator")]

    found = text or open_text_model(settings.model.path, settings.model.chat_template)
    return create_app(settings, GrpcCoordinators(ListedDirectory(listing)), found)


class Server(uvicorn.Server):
    """Leaves signals alone: whoever runs the process owns them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run(settings: Settings, stop: asyncio.Event) -> None:
    """Serve HTTP until `stop` is set, then let open streams end for a moment. Raises NotReady if the port is taken."""
    config = uvicorn.Config(
        build_app(settings),
        host=settings.gateway.host,
        port=settings.gateway.port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=5,
    )
    server = Server(config)
    serving = asyncio.create_task(server.serve())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    stopping.cancel()
    await serving
