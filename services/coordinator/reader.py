"""Rows of any request, from wherever they come: generated here, followed in the store, or taken over from the dead."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Protocol

from seqmtp_serve.errors import Fenced, InternalError, RequestNotFound, StoreBehind, StoreError
from seqmtp_serve.ports import FrontierStore, Snapshot
from seqmtp_serve.request import CommittedRow, Request
from seqmtp_serve.rounds import OwnedElsewhere, RoundDriver
from seqmtp_serve.tasks import end_tasks
from services.coordinator.owners import Owners
from services.store.records import Unfinished

LOOK_S = 0.5  # how often a follower asks after the owner
RECOMMIT_WAIT_S = 5.0  # for a living owner to commit again what the store lost
NO_ROWS = 2**31  # rows above this version: none


class ReadableStore(FrontierStore, Protocol):
    """A store whose rows can be followed by a process that does not own the request."""

    def follow(self, request_id: str, after_version: int = 0) -> AsyncGenerator[CommittedRow, None]: ...

    async def unfinished(self, request_id: str) -> Unfinished | None: ...

    async def attend(self, request_id: str, for_s: float) -> object: ...


class RequestReader:
    """Starts, finds and reads requests. `grace_s`: how long another owner waits for a reader that follows here."""

    def __init__(self, driver: RoundDriver, store: ReadableStore, owners: Owners, *, grace_s: float) -> None:
        self._driver, self._store, self._owners, self._grace_s = driver, store, owners, grace_s

    async def start(self, request: Request, meta: Mapping[str, str]) -> None:
        """Create the request unless it exists: then its record's request and meta count, not these.

        Raises what `RoundDriver.submit` raises. A record whose owner is gone is left to who reads it, or to the scan.
        """
        with contextlib.suppress(OwnedElsewhere):
            await self._driver.submit(request, meta=meta, seen_epoch=0)

    async def find(self, request_id: str) -> Snapshot:
        """The record, whole. Raises RequestNotFound."""
        snapshot = await self._store.snapshot(request_id)
        if snapshot is None:
            raise RequestNotFound(f"no request {request_id!r} is running or within its replay window")
        return snapshot

    async def rows(self, request_id: str, after_version: int) -> AsyncGenerator[CommittedRow, None]:
        """Every row above a version, once and in order, up to the one that carries `finish`.

        Raises RequestNotFound, StoreBehind when the record has fewer rows than `after_version` and nobody to commit the
        others again, and what ends a request without ending its record (NotReady, StoreUnreachable).
        """
        version, deadline = after_version, asyncio.get_running_loop().time() + RECOMMIT_WAIT_S
        while True:
            async for row in self._from_driver(request_id, version):
                version = row.version
                yield row
                if row.finish is not None:
                    return
            snapshot = await self._store.snapshot(request_id, version)
            if snapshot is None:
                raise RequestNotFound(f"no request {request_id!r} is running or within its replay window")
            if snapshot.finish is not None and version <= snapshot.version:
                async with contextlib.aclosing(self._store.follow(request_id, version)) as rest:
                    async for row in rest:
                        yield row
                return
            if snapshot.finish is not None and version == snapshot.version + 1:
                return  # what was read last is that it ended without another row
            behind = StoreBehind(f"{request_id}: a reader has row {version}, the record only {snapshot.version}")
            if snapshot.finish is not None:
                raise behind
            if await self._owners.gone(_brief(snapshot)):
                await self._take_over(snapshot)
                if snapshot.version < version:
                    raise behind  # it will be generated again, in rows that may be cut otherwise: read from the first
            elif snapshot.version < version:
                if asyncio.get_running_loop().time() > deadline:
                    raise behind
                await asyncio.sleep(LOOK_S)
            else:
                async for row in self._followed(request_id, version):
                    version = row.version
                    yield row
                    if row.finish is not None:
                        return

    async def take_over(self, record: Unfinished) -> bool:
        """Go on with a request whose owner is gone. False when it ended, or somebody else was faster."""
        snapshot = await self._store.snapshot(record.request_id, NO_ROWS)
        return snapshot is not None and snapshot.finish is None and await self._take_over(snapshot)

    async def _take_over(self, snapshot: Snapshot) -> bool:
        try:
            await self._driver.submit(snapshot.request, meta=snapshot.meta, seen_epoch=snapshot.epoch)
        except OwnedElsewhere:
            return False
        return True

    async def _from_driver(self, request_id: str, version: int) -> AsyncIterator[CommittedRow]:
        """Rows of a request that is live here, as long as it is."""
        try:
            async for row in self._driver.attach(request_id, version):
                yield row
        except (Fenced, RequestNotFound):
            return

    async def _followed(self, request_id: str, version: int) -> AsyncIterator[CommittedRow]:
        """Rows that another coordinator commits, as long as it is there."""
        watching = asyncio.create_task(self._until_gone(request_id))
        try:
            async with contextlib.aclosing(self._store.follow(request_id, version)) as rows:
                following = asyncio.ensure_future(anext(rows, None))
                try:
                    while True:
                        await asyncio.wait({following, watching}, return_when=asyncio.FIRST_COMPLETED)
                        if not following.done():
                            watching.result()
                            return
                        row = following.result()
                        if row is None:
                            raise InternalError(f"{request_id}: its rows ended without a last one")
                        yield row
                        following = asyncio.ensure_future(anext(rows, None))
                finally:
                    await end_tasks(following)
        except StoreBehind:
            return  # its owner may have the rows: see `rows`
        finally:
            await end_tasks(watching)

    async def _until_gone(self, request_id: str) -> None:
        """Until the owner is gone; meanwhile it hears that somebody reads here."""
        while True:
            try:
                await self._store.attend(request_id, self._grace_s + 2 * LOOK_S)
                await asyncio.sleep(LOOK_S)
                record = await self._store.unfinished(request_id)
                if record is not None and await self._owners.gone(record):
                    return
            except StoreError:
                await asyncio.sleep(LOOK_S)


def _brief(snapshot: Snapshot) -> Unfinished:
    return Unfinished(
        request_id=snapshot.request.request_id,
        owner=snapshot.owner,
        epoch=snapshot.epoch,
        lease_left_s=snapshot.lease_left_s,
    )
