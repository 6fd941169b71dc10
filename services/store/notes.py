"""Round notes beside a request's record: written once by each coordinator that is through with the request.

KEY  seqmtp:{<request id>}:notes   list    zlib of a RoundNotes message, one a coordinator; the newest `OWNERS` stay

They live as long as the record does, and the record does not need them: what is lost here is a reason, never a token.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import cast

from redis.asyncio import Redis

from seqmtp_serve.frontier.round_notes import RoundNote
from services.rpc.convert import from_wire, to_wire
from services.rpc.wire import coordinator
from services.store.client import reachable

OWNERS = 8
QUICKLY = 1  # zlib's level


def key(request_id: str) -> str:
    """In the slot of the request's record."""
    return f"seqmtp:{{{request_id}}}:notes"


class NoteStore:
    """On the store's own connections. Both calls raise StoreUnreachable and are not repeated here."""

    def __init__(self, redis: Redis, *, window_s: float) -> None:
        self._redis, self._window_ms = redis, max(1, round(1000 * window_s))

    async def keep(self, request_id: str, notes: Sequence[RoundNote]) -> None:
        """Put these beside what other coordinators kept."""
        packed = zlib.compress(pack_notes(notes).SerializeToString(), QUICKLY)
        with reachable():
            async with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.rpush(key(request_id), packed)
                pipeline.ltrim(key(request_id), -OWNERS, -1)
                pipeline.pexpire(key(request_id), self._window_ms)
                await pipeline.execute()

    async def read(self, request_id: str) -> tuple[RoundNote, ...]:
        """All that is kept, in the order it was kept."""
        with reachable():
            found = await self._redis.lrange(key(request_id), 0, -1)
        messages = (coordinator.RoundNotes.FromString(zlib.decompress(cast(bytes, each))) for each in found)
        return tuple(note for message in messages for note in unpack_notes(message))


def pack_notes(notes: Sequence[RoundNote]) -> coordinator.RoundNotes:
    """What `unpack_notes` reads."""
    return coordinator.RoundNotes(notes=map(to_wire, notes))


def unpack_notes(message: coordinator.RoundNotes) -> tuple[RoundNote, ...]:
    """Inverse of `pack_notes`."""
    return tuple(from_wire(RoundNote, note) for note in message.notes)
