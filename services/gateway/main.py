"""The gateway as one process, or inside one Ray Serve replica: `run(settings, stop)`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from seqmtp_serve.errors import NotReady
from services.accounts import AccountBook
from services.gateway.app import create_app
from services.gateway.directory import RegistryDirectory
from services.gateway.drain import Drain
from services.gateway.grpc_coordinators import GrpcCoordinators
from services.gateway.http_connection import BoundedConnection
from services.gateway.limits import SharedLimits
from services.gateway.measure import Measures
from services.gateway.text_model import open_text_model
from services.rpc.serving import at_most
from services.settings import Settings
from services.store.connection import connect

LOGGER = logging.getLogger("seqmtp.gateway")
LAST_WORDS_S = 2  # for the last events of answers that the drain ended


def build_app(settings: Settings) -> FastAPI:
    """The application over the real services, found through the registry. Connections are made at first use.

    Raises NotReady without a store, and what `open_text_model` raises.
    """
    store = settings.store
    if store.url is None:
        raise NotReady("The gateway finds coordinators through the store: give --redis-url.")
    redis = connect(store.url, password=store.resolved_password(), socket_timeout_s=store.socket_timeout_s)
    measures = Measures(CollectorRegistry())
    coordinators = GrpcCoordinators(RegistryDirectory(redis), wrong_row=measures.wrong_row)
    text = open_text_model(settings.model.path, settings.model.chat_template)
    return create_app(settings, coordinators, text, AccountBook(redis), SharedLimits(redis), measures)


class Server(uvicorn.Server):
    """Leaves signals alone: whoever runs the process owns them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run(settings: Settings, stop: asyncio.Event) -> None:
    """Serve HTTP until `stop` is set, then let open answers go on for `drain_s`. Raises NotReady if the port is taken.

    While it drains, whoever connects is told so: `/ready` and new requests are answered 503.
    """
    app = build_app(settings)
    drain: Drain = app.state.drain
    with bind(settings.gateway.host, settings.gateway.port) as listener:
        server = Server(http_config(app))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        stopping = asyncio.create_task(stop.wait())
        LOGGER.info("serving HTTP on %s:%d", *listener.getsockname()[:2])
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            drain.begin()
            await at_most(settings.drain_s, drain.all_over)
            drain.expire()
        server.should_exit = True
        stopping.cancel()
        await serving


def http_config(app: FastAPI) -> uvicorn.Config:
    """How the application is served: bounded connections, no WebSockets, no line for each request."""
    return uvicorn.Config(
        app,
        http=BoundedConnection,
        ws="none",
        log_config=None,  # its own handlers would show secrets
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=LAST_WORDS_S,
    )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises NotReady if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise NotReady(f"Cannot listen on {host}:{port}: {error.strerror or error}.") from error
