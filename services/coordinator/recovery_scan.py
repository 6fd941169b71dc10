"""Requests whose coordinator is gone and that nobody reads now: found by a look over all records, and gone on with.

A reader needs no scan (`reader.py`); this is for background requests, and for clients that are on their way back. It
runs when this coordinator starts, when another one leaves, and now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from seqmtp_serve.errors import SeqMTPError, Unavailable
from seqmtp_serve.tasks import end_tasks
from services.coordinator.owners import Owners
from services.coordinator.reader import RequestReader
from services.registry import Registry
from services.store.records import Unfinished

EVERY_S = 30.0
SOON_S = 1.0  # after a scan that had to leave something; doubled each time

log = logging.getLogger(__name__)


class ScannableStore(Protocol):
    """The one call of a store that this needs."""

    def all_unfinished(self) -> AsyncIterator[Unfinished]: ...


class RecoveryScan:
    """`is_live` says what runs here; `adopted` is called with each request that runs here from now on."""

    def __init__(
        self,
        store: ScannableStore,
        reader: RequestReader,
        owners: Owners,
        *,
        is_live: Callable[[str], bool],
        adopted: Callable[[str], None],
    ) -> None:
        self._store, self._reader, self._owners = store, reader, owners
        self._is_live, self._adopted = is_live, adopted

    async def keep(self, registry: Registry, period_s: float) -> None:
        """Scan whenever it may find something. Runs until cancelled."""
        left = asyncio.Event()
        watching = asyncio.create_task(self._watch(registry, period_s, left))
        pause_s = SOON_S
        try:
            while True:
                left.clear()
                try:
                    whole = await self.scan()
                except SeqMTPError as error:
                    log.warning("the records could not be scanned: %s", error)
                    whole = False
                pause_s = EVERY_S if whole else min(pause_s, EVERY_S / 2)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await left.wait()
                pause_s = SOON_S if whole else 2 * pause_s
        finally:
            await end_tasks(watching)

    async def scan(self) -> bool:
        """One look over all records. False when an orphan was left because nothing can be taken in now."""
        registered = await self._owners.registered()
        async for record in self._store.all_unfinished():
            fresh = record.lease_left_s > 0 and record.owner in registered
            if fresh or self._is_live(record.request_id) or not await self._owners.gone(record):
                continue
            try:
                if await self._reader.take_over(record):
                    log.info("%s goes on here: %s is gone", record.request_id, record.owner or "its owner")
                    self._adopted(record.request_id)
            except Unavailable as error:
                log.info("%s is left for later: %s", record.request_id, error)
                return False
            except SeqMTPError as error:  # this record cannot be gone on with; others can
                log.warning("%s cannot be taken over: %s", record.request_id, error)
        return True

    async def _watch(self, registry: Registry, period_s: float, left: asyncio.Event) -> None:
        known: set[str] = set()
        async for peers in registry.watch("coordinator", period_s):
            now = {peer.id for peer in peers}
            if known - now:
                left.set()
            known = now
