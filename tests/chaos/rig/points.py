"""The rig's end of the fault points (`services/fault_points.py`): arm one, and hold whoever reaches it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from seqmtp_serve.fault_points import FaultPoint
from services.fault_points import SOCKET

REACHED_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A process that waits at a point."""

    role: str
    point: str
    pid: int


class Points:
    """One point at a time. Use inside `async with`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        self.folder = folder
        self._hit: asyncio.Future[tuple[Hit, asyncio.StreamWriter]] | None = None

    async def __aenter__(self) -> Points:
        self._listener = await asyncio.start_unix_server(self._told, path=self.folder / SOCKET)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._listener.close()

    @contextlib.asynccontextmanager
    async def caught(self, role: str, point: FaultPoint) -> AsyncIterator[Hit]:
        """Arm the point; inside the block the first worker of `role` to reach it waits. TimeoutError: none came."""
        armed = self.folder / f"{role}.{point}"
        self._hit = asyncio.get_running_loop().create_future()
        armed.touch()
        try:
            hit, writer = await asyncio.wait_for(self._hit, REACHED_S)
        finally:
            armed.unlink(missing_ok=True)
        try:
            yield hit
        finally:
            with contextlib.suppress(OSError):
                writer.write(b".")
                await writer.drain()
            writer.close()

    async def _told(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if not line or self._hit is None or self._hit.done():  # a worker that starts looks whether a rig is here
            writer.close()
            return
        told = json.loads(line)
        self._hit.set_result((Hit(role=told["role"], point=told["point"], pid=told["pid"]), writer))
