"""Readers of rows that another process commits: one blocked XREAD serves all followers of a process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from seqmtp_serve.errors import RequestNotFound, StoreBehind, StoreUnreachable
from seqmtp_serve.frontier.sequence import end_row
from seqmtp_serve.ports import Snapshot
from seqmtp_serve.request import CommittedRow, FinishReason
from seqmtp_serve.tasks import end_tasks
from services.store.connection import FIRST_PAUSE_S, LAST_PAUSE_S, TRANSIENT
from services.store.records import is_row, keys, request_id_of, unpack_ref, unpack_row, version_of

BLOCK_MS = 200  # below any socket timeout
BY_A_ROW = (FinishReason.STOP, FinishReason.LENGTH)  # the ways to end that a row of tokens always carries
QUIET_S = 5.0  # a follower that heard nothing for so long looks at the record itself: it may have expired


class _Snapshots(Protocol):
    async def snapshot(self, request_id: str, after_version: int = 0) -> Snapshot | None: ...


@dataclass(slots=True, eq=False)
class _Cursor:
    """One follower: where it is, and what it has not yet taken."""

    key: bytes
    version: int
    inbox: asyncio.Queue[CommittedRow | StoreUnreachable] = field(default_factory=asyncio.Queue)


class RowFollower:
    """Shares one connection among all followers of one event loop. It reads only while somebody follows."""

    def __init__(self, redis: Redis, *, deadline_s: float) -> None:
        self._redis = redis
        self._deadline_s = deadline_s
        self._cursors: set[_Cursor] = set()
        self._task: asyncio.Task[None] | None = None
        self._reader_id: int | None = None

    async def follow(
        self, store: _Snapshots, request_id: str, after_version: int
    ) -> AsyncGenerator[CommittedRow, None]:
        """Yield every row above `after_version` once, in order; returns after the one that carries `finish`.

        A request that ended without a row (cancelled, failed) yields a last row without tokens, after the last.
        Raises RequestNotFound if the record is unknown or expires meanwhile, StoreBehind if it is older than
        `after_version`, StoreUnreachable if the store is away for too long.
        """
        cursor = _Cursor(keys(request_id)[1].encode(), after_version)
        try:
            while True:
                snapshot = await store.snapshot(request_id, cursor.version)
                if snapshot is None:
                    raise RequestNotFound(f"no request {request_id!r} is running or within its replay window")
                if snapshot.version < cursor.version:
                    raise StoreBehind(f"{request_id}: a reader has row {cursor.version}, the store {snapshot.version}")
                for row in snapshot.rows:
                    cursor.version = row.version
                    yield row
                if snapshot.finish is not None:
                    if snapshot.finish in BY_A_ROW:
                        return
                    if not snapshot.rows or snapshot.rows[-1].finish is None:
                        yield end_row(snapshot.ref, snapshot.finish)
                    return
                async for row in self._live(cursor):
                    yield row
                    if row.finish is not None:
                        return
        finally:
            self._cursors.discard(cursor)

    async def close(self) -> None:
        """Stop reading."""
        if self._task is not None:
            await end_tasks(self._task)

    async def _live(self, cursor: _Cursor) -> AsyncIterator[CommittedRow]:
        """Rows as the shared reader delivers them; ends when it has been quiet for `QUIET_S`."""
        await self._join(cursor)
        while True:
            try:
                async with asyncio.timeout(QUIET_S):
                    item = await cursor.inbox.get()
            except TimeoutError:
                if not cursor.inbox.empty():
                    continue
                self._cursors.discard(cursor)
                return
            if isinstance(item, StoreUnreachable):
                raise item
            yield item

    async def _join(self, cursor: _Cursor) -> None:
        self._cursors.add(cursor)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._read())
        elif self._reader_id is not None:
            with contextlib.suppress(*TRANSIENT, ResponseError):  # else it sees the new key when its block ends
                await self._redis.client_unblock(self._reader_id)

    async def _read(self) -> None:
        """The shared reader: until nobody follows, or the store has been away for `deadline_s`."""
        heard_at, pause_s = monotonic(), FIRST_PAUSE_S
        while self._cursors:
            try:
                async with self._redis.client() as connection:
                    self._reader_id = await connection.client_id()
                    while self._cursors:
                        self._deliver(await connection.xread(self._positions(), block=BLOCK_MS))
                        heard_at, pause_s = monotonic(), FIRST_PAUSE_S
            except TRANSIENT as error:
                if monotonic() - heard_at > self._deadline_s:
                    for cursor in self._cursors:
                        cursor.inbox.put_nowait(StoreUnreachable(f"the store is away: {error}"))
                    self._cursors.clear()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
            finally:
                self._reader_id = None

    def _positions(self) -> dict[Any, Any]:
        """Per stream, the entry after which to read: the furthest behind of its followers decides."""
        lowest: dict[bytes, int] = {}
        for cursor in self._cursors:
            lowest[cursor.key] = min(cursor.version, lowest.get(cursor.key, cursor.version))
        return {key: f"{version}-0" for key, version in lowest.items()}

    def _deliver(self, streams: Any) -> None:
        # [(stream, [(entry id, fields)])]: protocol 2
        for key, entries in streams:
            for cursor in [cursor for cursor in self._cursors if cursor.key == key]:
                for entry_id, fields in entries:
                    self._deliver_one(cursor, entry_id, fields)

    def _deliver_one(self, cursor: _Cursor, entry_id: bytes, fields: dict[bytes, bytes]) -> None:
        version, request_id = version_of(entry_id), request_id_of(cursor.key)
        if is_row(entry_id):
            if version <= cursor.version:
                return
            row = unpack_row(request_id, entry_id, fields)
        else:
            row = end_row(unpack_ref(request_id, entry_id, fields), FinishReason(fields[b"finish"].decode()))
        cursor.version = version
        cursor.inbox.put_nowait(row)
        if row.finish is not None:
            self._cursors.discard(cursor)
