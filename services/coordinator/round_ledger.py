"""A request's ledger from wherever its parts are: the record, notes in the store, notes in a coordinator's memory."""

from __future__ import annotations

import asyncio
import logging

from redis.exceptions import RedisError

from seqmtp_serve.errors import StoreError
from seqmtp_serve.frontier.round_notes import KEPT_ROUNDS, RequestLedger, RoundNotes
from services.coordinator.owners import Owners
from services.coordinator.reader import RequestReader
from services.store.notes import NoteStore

KEEP_EVERY_S = 0.25
LAST_S = 1.0  # a coordinator that ends gives the store so long

log = logging.getLogger(__name__)


class RoundLedger:
    """`notes` are those of this coordinator's own driver."""

    def __init__(self, notes: RoundNotes, store: NoteStore, reader: RequestReader, owners: Owners) -> None:
        self.notes = notes
        self._store, self._reader, self._owners = store, reader, owners

    async def of(self, request_id: str) -> RequestLedger:
        """As it is now. Raises RequestNotFound, StoreError; an owner that does not answer only costs its notes."""
        record = await self._reader.find(request_id)
        theirs = await self._owners.notes(record.owner, request_id)
        kept = await self._store.read(request_id)  # after its owner was asked: what it just wrote is here
        found = {note.version: note for note in (*kept, *theirs, *self.notes.of(request_id))}
        whole = tuple(found[version] for version in sorted(found) if version <= record.version)
        return RequestLedger(record=record, notes=whole[-KEPT_ROUNDS:])

    async def keep(self) -> None:
        """Put the notes of requests that ended here into the store, until cancelled. If it is away, later."""
        while True:
            await asyncio.sleep(KEEP_EVERY_S)
            await self._keep_ended()

    async def keep_last(self) -> None:
        """The same, once, for a coordinator that ends."""
        try:
            async with asyncio.timeout(LAST_S):
                await self._keep_ended()
        except TimeoutError:
            log.warning("the store did not take the last round notes")

    async def _keep_ended(self) -> None:
        while (ended := self.notes.oldest_ended()) is not None:
            try:
                await self._store.keep(*ended)
            except (StoreError, RedisError) as error:  # away, or full
                log.warning("round notes wait for the store: %s", error)
                return
            self.notes.kept(*ended)
