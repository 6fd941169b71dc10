"""Admission by the store's memory: newcomers are turned away while there is still room for those under way."""

from __future__ import annotations

import asyncio
import contextlib

from redis.asyncio import Redis
from redis.exceptions import RedisError

from seqmtp_serve.errors import Overloaded

PERIOD_S = 0.5
RESERVE = 0.1  # of the server's memory, kept for rows of running requests
LONGEST_WAIT_S = 60.0


class StorePressure:
    """`limit_bytes`: the most that may be in use when a request comes in; None: nine tenths of the server's own limit.

    A server without a limit of its own is never full.
    """

    def __init__(self, redis: Redis, *, limit_bytes: int | None, window_s: float) -> None:
        self._redis, self._limit, self._window_s = redis, limit_bytes, window_s
        self.used_bytes = 0
        self.limit_bytes = limit_bytes or 0  # 0: none

    async def keep(self) -> None:
        """Look at the server again and again, until cancelled. While it is away the last reading stands."""
        while True:
            await self.read()
            await asyncio.sleep(PERIOD_S)

    async def read(self) -> None:
        """One reading."""
        with contextlib.suppress(RedisError, OSError):
            memory = await self._redis.info("memory")
            self.used_bytes = int(memory["used_memory"])
            if self._limit is None:
                self.limit_bytes = int((1 - RESERVE) * int(memory["maxmemory"]))

    def levels(self) -> dict[str, float]:
        """For telemetry."""
        return {"store_used_bytes": float(self.used_bytes), "store_limit_bytes": float(self.limit_bytes)}

    def check(self) -> None:
        """Raises Overloaded while the store is too full for another request.

        Records go when their replay window has passed, so what is too much is gone after its share of the window.
        """
        excess = self.used_bytes - self.limit_bytes
        if self.limit_bytes and excess > 0:
            wait_s = min(max(1.0, self._window_s * excess / self.used_bytes), LONGEST_WAIT_S)
            sentence = f"the store holds {self.used_bytes} bytes, new requests are taken up to {self.limit_bytes}"
            raise Overloaded(sentence, retry_after_s=wait_s)
