"""What each API key may still use: two buckets, of requests and of tokens, that fill up over a minute.

The buckets lie in the store and count by its clock (`services/store/limit.lua`): a key's limits hold over all gateways.
Each gateway also keeps buckets of its own. They see a part of what the shared ones see, so they refuse only what those
would refuse too, without asking; and while the store does not answer they alone decide: a key may then use its limits
once at each gateway. (Little is lost by that: without the store no request begins at all.)
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from redis.asyncio import Redis

from seqmtp_serve.errors import RateLimited, StoreError, Unavailable
from seqmtp_serve.tasks import end_tasks
from services.gateway.keys import Key
from services.store.connection import Connection, ScriptCall
from services.store.scripts import LIMIT

LOGGER = logging.getLogger("seqmtp.gateway")
MINUTE_S = 60.0
TELL_S = 0.2  # tokens are reported this often; a request that begins brings its own key's along


class Limits(Protocol):
    """Tokens are known only afterwards: their bucket may go below empty; then no request begins until it is not."""

    async def begin(self, key: Key) -> None:
        """One request of the key begins. Raises RateLimited."""
        ...

    def used(self, key: Key, tokens: int) -> None:
        """Tokens of prompt or answer were used."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """A key with what holds it to its limits: for whoever counts tokens."""

    key: Key
    limits: Limits

    def used(self, tokens: int) -> None:
        """Tokens of prompt or answer were used."""
        self.limits.used(self.key, tokens)


class OwnLimits:
    """Those of one gateway alone: the plain form."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[bytes, _Buckets] = {}

    async def begin(self, key: Key) -> None:
        """As in Limits."""
        self.take(key)

    def take(self, key: Key) -> None:
        """`begin`, at once."""
        buckets = self._of(key)
        if key.requests is not None and buckets.requests < 1:
            raise refusal(key, "requests", (1 - buckets.requests) / key.requests * MINUTE_S)
        if key.tokens is not None and buckets.tokens <= 0:
            raise refusal(key, "tokens", (1 - buckets.tokens) / key.tokens * MINUTE_S)
        buckets.requests -= 1

    def give_back(self, key: Key) -> None:
        """The request that was taken did not begin."""
        self._of(key).requests += 1

    def used(self, key: Key, tokens: int) -> None:
        """As in Limits."""
        self._of(key).tokens -= tokens

    def _of(self, key: Key) -> _Buckets:
        """The key's buckets, as full as they are now. Changed limits start afresh."""
        now, requests, tokens = self._clock(), key.requests or 0.0, key.tokens or 0.0
        known = self._buckets.get(key.secret)
        if known is None or known.key != key:
            known = self._buckets[key.secret] = _Buckets(key, now)
        minutes, known.at = (now - known.at) / MINUTE_S, now
        known.requests = min(requests, known.requests + minutes * requests)
        known.tokens = min(tokens, known.tokens + minutes * tokens)
        return known


class _Buckets:
    """What is left of each, and since when."""

    __slots__ = ("at", "key", "requests", "tokens")

    def __init__(self, key: Key, at: float) -> None:
        self.key, self.at = key, at
        self.requests, self.tokens = key.requests or 0.0, key.tokens or 0.0


class SharedLimits:
    """Those of all gateways over one store. `kept` must run for tokens to be told."""

    def __init__(self, redis: Redis, own: OwnLimits | None = None) -> None:
        self._store = Connection(redis, deadline_s=0.0)  # one attempt: a request waits for its answer
        self._own = own or OwnLimits()
        self._spent: dict[Key, int] = {}  # not told yet
        self._alone = False

    async def begin(self, key: Key) -> None:
        """As in Limits."""
        if key.requests is None and key.tokens is None:
            return
        self._own.take(key)
        refused, wait_ms = await self._tell(key, begin=True)
        if refused:
            self._own.give_back(key)
            raise refusal(key, refused, wait_ms / 1000)

    def used(self, key: Key, tokens: int) -> None:
        """As in Limits; the store hears of it a moment later."""
        if key.tokens is not None:
            self._own.used(key, tokens)
            self._spent[key] = self._spent.get(key, 0) + tokens

    async def tell(self) -> None:
        """Tell the store what was used."""
        for key in tuple(self._spent):
            await self._tell(key, begin=False)

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Tell it again and again while the block runs, and once more then."""

        async def keep() -> None:
            while True:
                await asyncio.sleep(TELL_S)
                await self.tell()

        keeping = asyncio.create_task(keep())
        try:
            yield
        finally:
            await end_tasks(keeping)
            await self.tell()

    async def _tell(self, key: Key, *, begin: bool) -> tuple[str, int]:
        """What is used up and for how many ms. An answer that is lost is asked for again with the next call: the key
        may pay twice for what was used then, never not at all.
        """
        spent = self._spent.pop(key, 0)
        limits = tuple("" if limit is None else repr(limit) for limit in (key.requests, key.tokens))
        name = "seqmtp:limit:" + hashlib.sha256(key.secret).hexdigest()
        call = ScriptCall(script=LIMIT, keys=(name,), args=(*limits, int(begin), spent))
        try:
            ((refused, wait_ms),) = await self._store.run([call])
        except (Unavailable, StoreError) as error:
            if spent:
                self._spent[key] = self._spent.get(key, 0) + spent
            self._say(alone=True, why=str(error))
            return "", 0
        self._say(alone=False)
        return refused.decode() if isinstance(refused, bytes) else refused, int(wait_ms)

    def _say(self, *, alone: bool, why: str = "") -> None:
        if alone != self._alone:
            self._alone = alone
            LOGGER.warning("keys are held to their limits at this gateway alone: %s", why) if alone else LOGGER.info(
                "keys are held to their limits over all gateways again"
            )


def refusal(key: Key, what: str, wait_s: float) -> RateLimited:
    """In words, with the time to wait."""
    limit = key.requests if what == "requests" else key.tokens
    return RateLimited(f"This key may use {limit:g} {what} a minute; try again in a moment.", retry_after_s=wait_s)
