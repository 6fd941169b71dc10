"""A TCP proxy that can be told to break every connection, as a network does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Cut:
    """Forwards connections; `now()` resets those that are open. `num_bytes` counts what went to clients."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._open: set[asyncio.StreamWriter] = set()
        self.num_bytes = 0

    def now(self) -> None:
        """Break every connection."""
        for writer in self._open:
            writer.transport.abort()

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, both ways, until either side ends it."""
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
            self._open |= {writer, far_writer}
            ways = [self._pump(reader, far_writer), self._pump(far_reader, writer, counted=True)]
            await asyncio.gather(*ways)
            self._open -= {writer, far_writer}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counted: bool = False) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
                self.num_bytes += len(data) if counted else 0
        writer.close()


@contextlib.asynccontextmanager
async def cutting(url: str) -> AsyncIterator[tuple[str, Cut]]:
    """A proxy before `url`: its own URL, and the hand on the cable."""
    host, _, port = url.removeprefix("http://").partition(":")
    cut = Cut(host, int(port))
    server = await asyncio.start_server(cut.forward, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", cut
    finally:
        cut.now()
        server.close()
