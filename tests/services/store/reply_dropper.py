"""A proxy on a unix socket that forwards requests and loses chosen replies: the server did the work, nobody heard."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path


class ReplyDropper:
    """Between a client and the server. While `losing` > 0, a reply closes the client's connection instead."""

    def __init__(self, server: Path) -> None:
        self._server = server
        self.losing = 0
        self.lost = 0

    @contextlib.asynccontextmanager
    async def listen(self, socket: Path) -> AsyncIterator[str]:
        """Serve on `socket` while the block runs; gives its URL."""
        listener = await asyncio.start_unix_server(self._serve, path=socket)
        async with listener:
            yield f"unix://{socket}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_unix_connection(str(self._server))
        forward = asyncio.create_task(self._forward(reader, upstream_writer))
        try:
            while reply := await upstream_reader.read(65536):
                if self.losing:
                    self.losing -= 1
                    self.lost += 1
                    break
                writer.write(reply)
                await writer.drain()
        finally:
            forward.cancel()
            upstream_writer.close()
            writer.close()

    @staticmethod
    async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while request := await reader.read(65536):
                writer.write(request)
                await writer.drain()
