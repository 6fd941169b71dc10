"""One Redis connection pool with our own patience: short attempts, idempotent repeats, one total deadline.

The client library's defaults repeat every command ten times with 5 s each: a stopped server would hold a commit for
more than 25 s. Here an attempt ends after `socket_timeout_s`, is sent again as it was (each script answers a repeat
with what it already did) and becomes StoreUnreachable after `deadline_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from redis.asyncio import ConnectionPool, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)
from redis.exceptions import (
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TryAgainError,
)
from redis.exceptions import (
    TimeoutError as RedisTimeoutError,
)

from seqmtp_serve.errors import Overloaded, StoreError, StoreUnreachable
from services.store.scripts import ALL, Script

# Nothing is wrong with the call: the server is away, loading, demoted or moving. (A busy or loading server answers
# with a ConnectionError.)
TRANSIENT = (RedisConnectionError, RedisTimeoutError, ReadOnlyError, TryAgainError, OSError)
FIRST_PAUSE_S = 0.01
LAST_PAUSE_S = 0.25
WRITTEN = "seqmtp:written"  # a key that means nothing, to be written to


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCall:
    """One EVALSHA."""

    script: Script
    keys: tuple[str, ...]
    args: tuple[str | bytes | int, ...]


def connect(url: str, *, password: str | None = None, socket_timeout_s: float = 0.5) -> Redis:
    """A client that gives up after one attempt. It opens nothing until the first command.

    `redis://`, `unix://`, or `rediss://` for TLS: `?ssl_ca_certs=…&ssl_certfile=…&ssl_keyfile=…` name PEM files. A user
    of the server's access control stands before an `@`.
    """
    pool = ConnectionPool.from_url(
        url,
        password=password,
        protocol=2,
        socket_timeout=socket_timeout_s,
        socket_connect_timeout=socket_timeout_s,
        retry=Retry(NoBackoff(), 0),
    )
    if pool.connection_class is SSLConnection:
        pool.connection_class = _RenewedSSLConnection
    return Redis.from_pool(pool)


class _RenewedSSLConnection(SSLConnection):
    """Reads its files again whenever it connects: the library's keeps a certificate for as long as it is pooled, and
    one that has been renewed since may have lapsed.
    """

    async def connect(self) -> None:
        if not self.is_connected:
            self.ssl_context.context = None
        await super().connect()  # type: ignore[no-untyped-call]  # redis-py gives it no types


class Connection:
    """Runs scripts in non-transactional pipelines. Calls may overlap; those of one `run` share one round trip."""

    def __init__(self, redis: Redis, *, deadline_s: float) -> None:
        self.redis = redis
        self.deadline_s = deadline_s

    async def run(self, calls: Sequence[ScriptCall], *, replicas: int = 0, wait_ms: int = 0) -> list[Any]:
        """Answers in the order of `calls`. With `replicas`, only once so many hold what was written.

        Raises StoreUnreachable after the deadline (some calls may have run: repeat them as they were), Overloaded when
        the server's memory is full, StoreError for any other refusal.
        """
        answers: list[Any] = [None] * len(calls)
        pending = list(range(len(calls)))
        give_up_at = monotonic() + self.deadline_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                got = await self._attempt([calls[index] for index in pending], replicas, wait_ms)
                for index, answer in zip(pending, got, strict=True):
                    answers[index] = answer
                pending = [index for index in pending if isinstance(answers[index], NoScriptError)]
                if not pending:
                    return answers
                await self._load_scripts()
            except TRANSIENT as error:
                if monotonic() + pause_s > give_up_at:
                    raise StoreUnreachable(f"the store did not answer for {self.deadline_s:g} s: {error}") from error
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LAST_PAUSE_S)

    async def _attempt(self, calls: Sequence[ScriptCall], replicas: int, wait_ms: int) -> list[Any]:
        async with self.redis.pipeline(transaction=False) as pipeline:
            for call in calls:
                pipeline.evalsha(call.script.sha, len(call.keys), *call.keys, *call.args)
            if replicas:
                # WAIT asks for what its own connection wrote. A row that is there already was written over another,
                # maybe, and no replica has to hold it: with a write after it, this connection asks for both.
                pipeline.set(WRITTEN, b"")
                pipeline.execute_command("WAIT", replicas, wait_ms)
            answers = await pipeline.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, Exception) and not isinstance(answer, NoScriptError):
                raise _translated(answer)
        held = answers.pop() if replicas else 0
        if replicas:
            answers.pop()  # of the write before it
        if held < replicas and not any(isinstance(answer, NoScriptError) for answer in answers):
            raise RedisTimeoutError(f"{held} of {replicas} replicas hold the rows after {wait_ms} ms")
        return list(answers)

    async def _load_scripts(self) -> None:
        async with self.redis.pipeline(transaction=False) as pipeline:
            for script in ALL:
                pipeline.script_load(script.text)
            await pipeline.execute()


def _translated(error: Exception) -> Exception:
    """A server's refusal as our error; transient ones stay as they are, to be repeated."""
    if isinstance(error, TRANSIENT):
        return error
    if isinstance(error, OutOfMemoryError):
        return Overloaded("the store's memory is full")
    return StoreError(f"the store refused: {error}") if isinstance(error, RedisError) else error
