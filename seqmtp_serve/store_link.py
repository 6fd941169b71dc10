"""The frontier store as it comes and goes: every call is idempotent, so an unanswered one is simply made again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from secrets import token_hex
from typing import TypeVar

from seqmtp_serve.config import SchedulerConfig
from seqmtp_serve.errors import NotReady, Overloaded, StoreUnreachable
from seqmtp_serve.frontier.turnover import bounded
from seqmtp_serve.ports import Commit, CommitResult, FrontierStore, Snapshot
from seqmtp_serve.request import Request

Answer = TypeVar("Answer")


class StoreLink:
    """A store behind patience: short for callers who can be turned away, long for streams that would be lost.

    `error` says why the store is unreachable, None while it answers. `num_retries` counts calls made again.
    """

    def __init__(self, store: FrontierStore, config: SchedulerConfig, owner: str, clock: Callable[[], float]) -> None:
        self._store, self._config, self._owner, self._clock = store, config, owner, clock
        self.error: str | None = None
        self.num_retries = 0
        self._away_since = clock()

    async def acquire(
        self,
        request: Request,
        meta: Mapping[str, str] | None = None,
        *,
        seen_epoch: int | None = None,
        above: int = 0,
        patiently: bool = False,
    ) -> Snapshot:
        """Own the request's record, see `ports.FrontierStore`. Raises Overloaded when the store is full.

        Raises NotReady when the store stays unreachable; `patiently`: StoreUnreachable, after `store_wait_s`.
        """
        claim = token_hex(8)  # one for all attempts

        def call() -> Awaitable[Snapshot]:
            return self._store.acquire(
                request,
                self._owner,
                self._config.lease_s,
                meta=meta,
                seen_epoch=seen_epoch,
                above=above,
                claim=claim,
            )

        if patiently:
            return await self._until_answered(_waiting_for_room(call), self._config.store_wait_s)
        return await self._briefly(call)

    async def cancel(self, request_id: str, *, abandoned_at: int | None = None) -> CommitResult:
        """End the record. Raises NotReady when the store stays unreachable."""
        return await self._briefly(lambda: self._store.cancel(request_id, abandoned_at=abandoned_at))

    async def commit(self, commits: Sequence[Commit]) -> Sequence[CommitResult]:
        """Commit the very same rows until they are answered. Raises StoreUnreachable after `store_wait_s`.

        A store that is full is waited for as one that is away: these rows are of streams that are under way.
        """
        commit = _waiting_for_room(lambda: self._store.commit(commits))
        return await self._until_answered(commit, self._config.store_wait_s)

    async def snapshot(self, request_id: str, after_version: int) -> Snapshot | None:
        """Read the record. Raises StoreUnreachable after `store_wait_s`."""
        wait_s = self._config.store_wait_s
        return await self._until_answered(lambda: self._store.snapshot(request_id, after_version), wait_s)

    async def _briefly(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        try:
            return await self._until_answered(call, self._config.submit_wait_s)
        except StoreUnreachable as error:
            away_s = bounded(self._clock() - self._away_since)
            raise NotReady(f"the store does not answer: {error}", retry_after_s=away_s) from error

    async def _until_answered(self, call: Callable[[], Awaitable[Answer]], wait_s: float) -> Answer:
        started, delay = self._clock(), self._config.retry_first_s
        while True:
            try:
                answer = await call()
            except StoreUnreachable as error:
                if self.error is None:
                    self._away_since = started
                self.error = str(error) or "no answer in time"
                if self._clock() - started >= wait_s:
                    raise
            else:
                self.error = None
                return answer
            self.num_retries += 1
            await asyncio.sleep(delay)
            delay = min(2 * delay, self._config.retry_max_s)


def _waiting_for_room(call: Callable[[], Awaitable[Answer]]) -> Callable[[], Awaitable[Answer]]:
    async def patient() -> Answer:
        try:
            return await call()
        except Overloaded as error:
            raise StoreUnreachable(str(error)) from error

    return patient
