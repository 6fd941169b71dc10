"""The application behind a real socket, for what only a server shows: clients' parsers, disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

from services.gateway.fake import FakeCoordinator
from services.gateway.main import Server, http_config
from services.gateway.text_model import TextModel
from services.settings import Settings
from tests.services.gateway.world import TEXT, app_over


@contextlib.asynccontextmanager
async def serving(
    coordinator: FakeCoordinator, settings: Settings | None = None, text: TextModel = TEXT
) -> AsyncIterator[str]:
    """The base URL of a gateway that serves while the block runs."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = Server(http_config(app_over(coordinator, settings, text)))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


async def until(condition: object, seconds: float = 30.0) -> None:
    """Wait until `condition()` holds. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)
