"""What each process counted, kept beside the registry: any gateway can show the whole service in one scrape.

One field of one hash for each process, written about once a second. An account outlives its process by a day, so that
what a dead coordinator counted stays in the sums: its series stay where they were, which no rate can see. Only the rows
of its last second may be missing from them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

KEY = "seqmtp:accounts"
SPEAKER = "seqmtp:accounts:speaker"  # the gateway that sends them out
PERIOD_S = 1.0
LIVE_S = 15.0  # an account older than this is of a process that has ended, or hangs (hosts' clocks must agree so far)
KEPT_S = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """One process's. `counters` only rise, `gauges` are levels; `families` are a gateway's own, ready to be shown:
    [name, help, type, [[sample name, labels, value], …]].
    """

    kind: str
    id: str
    model: str = ""
    at: float = field(default_factory=time.time)
    counters: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)
    families: Sequence[Any] = ()

    def is_live(self, now: float | None = None) -> bool:
        """Whether its process was there a moment ago."""
        return (time.time() if now is None else now) - self.at < LIVE_S


class AccountBook:
    """All accounts. While the server is away, what was read last stands and nothing is written."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._read_at = float("-inf")
        self.known: Sequence[Account] = ()
        self._speaks = False

    async def refresh(self, max_age_s: float = PERIOD_S) -> Sequence[Account]:
        """Every account, as of at most `max_age_s` ago if the server answers; older than a day are thrown out."""
        if time.monotonic() - self._read_at > max_age_s:
            self._read_at = time.monotonic()
            with contextlib.suppress(RedisError, OSError, ValueError, TypeError):
                found = await self._redis.hgetall(KEY)
                accounts = [Account(**json.loads(value)) for value in found.values()]
                old = [each.id for each in accounts if time.time() - each.at > KEPT_S]
                if old:
                    await self._redis.hdel(KEY, *old)
                self.known = [each for each in accounts if each.id not in old]
        return self.known

    async def write(self, account: Account) -> None:
        """Write one."""
        with contextlib.suppress(RedisError, OSError):
            await self._redis.hset(KEY, account.id, json.dumps(asdict(account)))

    async def speaks(self, me: str, *, for_s: float) -> bool:
        """Whether `me` is the one that speaks for all, for so long from now. A server that is away changes nothing."""
        with contextlib.suppress(RedisError, OSError):
            lease_ms = max(1, round(1000 * for_s))
            if await self._redis.set(SPEAKER, me, nx=True, px=lease_ms):
                self._speaks = True
            else:
                self._speaks = await self._redis.get(SPEAKER) == me.encode()
                if self._speaks:
                    await self._redis.pexpire(SPEAKER, lease_ms)
        return self._speaks

    async def falls_silent(self, me: str) -> None:
        """Another may speak at once."""
        with contextlib.suppress(RedisError, OSError):
            if await self._redis.get(SPEAKER) == me.encode():
                await self._redis.delete(SPEAKER)

    async def keep(self, take: Callable[[], Account], period_s: float = PERIOD_S) -> None:
        """Write one again and again, until cancelled, and once more then."""
        try:
            while True:
                await self.write(take())
                await asyncio.sleep(period_s)
        finally:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.write(take()), 1.0)
