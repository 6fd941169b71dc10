"""A proxy between two processes that can fall silent, lose a reply, or cut every connection."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

CHUNK = 65536
Address = tuple[str, int] | Path  # host and port, or a unix socket


class Proxy:
    """Listens at one address and forwards to another. `fall_silent` holds all bytes, both ways, until `heal`."""

    def __init__(self, listen: Address, server: Address) -> None:
        self._listen, self._server = listen, server
        self._open = asyncio.Event()
        self._open.set()
        self._connections: set[asyncio.Task[None]] = set()
        self._losing = 0
        self._losing_to: tuple[bytes, ...] = ()
        self.num_lost = 0

    async def start(self) -> None:
        if isinstance(self._listen, Path):
            self._listener = await asyncio.start_unix_server(self._accept, path=self._listen)
        else:
            self._listener = await asyncio.start_server(self._accept, *self._listen)

    async def stop(self) -> None:
        self._listener.close()
        self.cut()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def fall_silent(self) -> None:
        """A black hole: connections stay, nothing passes, new ones are accepted and hang."""
        self._open.clear()

    def heal(self) -> None:
        """What was held back passes now."""
        self._open.set()

    def lead_to(self, server: Address) -> None:
        """From now on new connections go there."""
        self._server = server

    def cut(self) -> None:
        """Close every connection; new ones are served."""
        for connection in list(self._connections):
            connection.cancel()

    def lose_replies(self, number: int, to: tuple[bytes, ...] = (b"",)) -> None:
        """The next replies close their connection instead of arriving: the server did the work.

        Only those to what has one of `to` in it: what others ask meanwhile is answered.
        """
        self._losing, self._losing_to = number, to

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._serve(reader, writer)
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open.wait()
        if isinstance(self._server, Path):
            there, back = await asyncio.open_unix_connection(str(self._server))
        else:
            there, back = await asyncio.open_connection(*self._server)
        asked = [b""]
        pumps = [
            asyncio.create_task(self._pump(reader, back, asked, is_reply=False)),
            asyncio.create_task(self._pump(there, writer, asked, is_reply=True)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            back.close()

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, asked: list[bytes], *, is_reply: bool
    ) -> None:
        """`asked` holds what the connection sent last."""
        while data := await source.read(CHUNK):
            await self._open.wait()
            if not is_reply:
                asked[0] = data
            elif self._losing and any(part in asked[0] for part in self._losing_to):
                self._losing -= 1
                self.num_lost += 1
                return
            sink.write(data)
            await sink.drain()
