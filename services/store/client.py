"""The frontier store on Redis: each call is one atomic script, all rows of a step one round trip."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from secrets import token_hex
from typing import Any, cast

from redis.asyncio import Redis

from seqmtp_serve.errors import StoreUnreachable
from seqmtp_serve.frontier.ancestry import initial_digest
from seqmtp_serve.ports import Commit, CommitResult, Snapshot
from seqmtp_serve.request import CommittedRow, FinishReason, Ref, Request
from services.settings import StoreSettings
from services.store import scripts
from services.store.connection import TRANSIENT, Connection, ScriptCall, connect
from services.store.durability import require
from services.store.follow import RowFollower
from services.store.records import (
    STATES,
    Unfinished,
    keys,
    pack_finish,
    pack_meta,
    pack_request,
    pack_row,
    request_id_of,
    unpack_snapshot,
)

SCAN_COUNT = 500  # keys a look over the records asks for at a time


Watch = Callable[[Sequence[Commit]], AbstractContextManager[None]]


def _unwatched(commits: Sequence[Commit]) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


class RedisFrontierStore:
    """`ports.FrontierStore` on any Redis >= 7 or Valkey. One instance serves all tasks of one event loop.

    Every method raises StoreUnreachable after `settings.deadline_s` (repeat the call as it was), Overloaded when the
    server is out of memory, StoreError when it refuses or does not keep the configured durability class.
    """

    def __init__(self, url: str, settings: StoreSettings | None = None, watch: Watch = _unwatched) -> None:
        """`watch(commits)` is entered while a pipeline of commits is under way."""
        self._settings, self._watch = settings or StoreSettings(), watch
        self.redis: Redis = connect(
            url,
            password=self._settings.resolved_password(),
            socket_timeout_s=max(self._settings.socket_timeout_s, 2e-3 * self._settings.wait_ms * self._replicas),
        )
        self._connection = Connection(self.redis, deadline_s=self._settings.deadline_s)
        self._follower = RowFollower(self.redis, deadline_s=self._settings.deadline_s)
        self._durable = False

    async def acquire(
        self,
        request: Request,
        owner: str,
        lease_s: float,
        *,
        meta: Mapping[str, str] | None = None,
        seen_epoch: int | None = None,
        above: int = 0,
        claim: str = "",
    ) -> Snapshot:
        """Create the record, or take it over under a higher epoch. A finished record is returned as it is."""
        await self._require_durability()
        digest, seen = initial_digest(request.prompt_ids), "" if seen_epoch is None else seen_epoch
        what = (pack_request(request), pack_meta(meta), digest)
        how = (claim or token_hex(8), seen, above, _ms(lease_s), self._window_ms)
        answer = await self._write(scripts.ACQUIRE, request.request_id, *what, owner, *how)
        return unpack_snapshot(answer) or Snapshot(request=request, epoch=0, version=0, digest=digest)

    async def commit(self, commits: Sequence[Commit]) -> Sequence[CommitResult]:
        """One result a row, in order. In class C3 returns only once the replicas hold every row."""
        if not commits:
            return []
        await self._require_durability()
        calls = [
            ScriptCall(
                script=scripts.COMMIT,
                keys=keys(commit.row.request_id),
                args=(
                    commit.epoch,
                    commit.row.version,
                    commit.digest,
                    pack_row(commit.row),
                    pack_finish(commit.row.finish),
                    self._window_ms,
                ),
            )
            for commit in commits
        ]
        with self._watch(commits):
            answers = await self._connection.run(calls, replicas=self._replicas, wait_ms=self._settings.wait_ms)
        return [CommitResult(answer.decode()) for answer in answers]

    async def finish(self, request_id: str, epoch: int, reason: FinishReason) -> CommitResult:
        """End the record without a row. DUP: it ended so before."""
        answer = await self._write(scripts.FINISH, request_id, epoch, pack_finish(reason), self._window_ms)
        return CommitResult(answer.decode())

    async def renew(self, owned: Sequence[Ref], lease_s: float) -> Sequence[CommitResult]:
        """Keep the leases of requests that commit nothing for a while; with 0 s hand them back. One round trip."""
        lease_ms = round(1000 * lease_s)
        calls = [
            ScriptCall(script=scripts.RENEW, keys=keys(ref.request_id), args=(ref.epoch, lease_ms, self._window_ms))
            for ref in owned
        ]
        return [CommitResult(answer.decode()) for answer in await self._connection.run(calls)] if calls else []

    async def attend(self, request_id: str, for_s: float) -> CommitResult:
        """Leave word that somebody reads the request through this process, which does not own it."""
        return CommitResult((await self._run(scripts.ATTEND, request_id, _ms(for_s))).decode())

    async def cancel(self, request_id: str, *, abandoned_at: int | None = None) -> CommitResult:
        """End the record. DUP: it was cancelled before."""
        epoch = "" if abandoned_at is None else abandoned_at
        arguments = (pack_finish(FinishReason.CANCELLED), self._window_ms, epoch)
        return CommitResult((await self._write(scripts.CANCEL, request_id, *arguments)).decode())

    async def snapshot(self, request_id: str, after_version: int = 0) -> Snapshot | None:
        """State and rows of one instant; rows above `after_version` only."""
        return unpack_snapshot(await self._run(scripts.SNAPSHOT, request_id, after_version))

    async def unfinished(self, request_id: str) -> Unfinished | None:
        """Who works on a request that has not ended; None when it has, or is unknown."""
        (found,) = await self._briefs([keys(request_id)[0].encode()])
        return found

    async def all_unfinished(self) -> AsyncIterator[Unfinished]:
        """Every record that has not ended, in no order. Records that come or end meanwhile may be missed or shown."""
        cursor = 0
        while True:
            with reachable():
                cursor, states = await self.redis.scan(cursor, match=STATES, count=SCAN_COUNT)
            for found in await self._briefs(cast("list[bytes]", states)):
                if found is not None:
                    yield found
            if not cursor:
                return

    async def _briefs(self, states: Sequence[bytes]) -> list[Unfinished | None]:
        """By the keys of their states. The store's clock is read in the same round trip."""
        with reachable():
            async with self.redis.pipeline(transaction=False) as pipeline:
                pipeline.time()
                for state in states:
                    pipeline.hmget(state, "finish", "owner", "epoch", "lease")
                (seconds, micros), *found = await pipeline.execute()
        now_ms = 1000 * seconds + micros // 1000
        return [
            Unfinished(
                request_id=request_id_of(state),
                owner=owner.decode(),
                epoch=int(epoch),
                lease_left_s=(int(lease) - now_ms) / 1e3,
            )
            if finish == b""
            else None
            for state, (finish, owner, epoch, lease) in zip(states, found, strict=True)
        ]

    async def follow(self, request_id: str, after_version: int = 0) -> AsyncGenerator[CommittedRow, None]:
        """Committed rows above `after_version`, as they come, until the request ends. See `RowFollower.follow`."""
        async with contextlib.aclosing(self._follower.follow(self, request_id, after_version)) as rows:
            async for row in rows:
                yield row

    async def ping(self) -> None:
        """Raises StoreUnreachable unless the server answers."""
        await self._run(scripts.SNAPSHOT, "ping", 0)

    async def close(self) -> None:
        """Close every connection; followers end."""
        await self._follower.close()
        await self.redis.aclose()

    async def _write(self, script: scripts.Script, request_id: str, *args: str | bytes | int) -> Any:
        """One script that changes a record. In class C3 returns only once the replicas hold the change."""
        call = ScriptCall(script=script, keys=keys(request_id), args=args)
        answers = await self._connection.run([call], replicas=self._replicas, wait_ms=self._settings.wait_ms)
        return answers[0]

    async def _run(self, script: scripts.Script, request_id: str, *args: str | bytes | int) -> Any:
        return (await self._connection.run([ScriptCall(script=script, keys=keys(request_id), args=args)]))[0]

    async def _require_durability(self) -> None:
        if not self._durable:
            await require(self.redis, self._settings.durability)
            self._durable = True

    @property
    def _replicas(self) -> int:
        return self._settings.wait_replicas if self._settings.durability == "C3" else 0

    @property
    def _window_ms(self) -> int:
        return _ms(self._settings.replay_window_s)


@contextlib.contextmanager
def reachable() -> Iterator[None]:
    """For commands outside `Connection`, which are not repeated: a server that is away is StoreUnreachable."""
    try:
        yield
    except TRANSIENT as error:
        raise StoreUnreachable(f"the store does not answer: {error}") from error


def _ms(seconds: float) -> int:
    return max(1, round(1000 * seconds))
