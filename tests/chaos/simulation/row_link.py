"""The way of committed rows from a coordinator to who reads them, on which some are mixed up."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from random import Random

from seqmtp_serve.request import CommittedRow

# (the row, the one before it) -> what comes in its place
WAYS: tuple[Callable[[CommittedRow, CommittedRow], CommittedRow], ...] = (
    lambda row, before: replace(row, tokens=(*row.tokens[:-1], (row.tokens or (0,))[-1] ^ 1)),  # altered
    lambda row, before: before,  # replayed
    lambda row, before: replace(before, version=row.version, finish=row.finish),  # replayed as the next
    lambda row, before: replace(row, version=row.version + 1),  # of a later place
    lambda row, before: replace(row, epoch=row.epoch - 1),  # of an epoch that had passed
    lambda row, before: replace(row, request_id=f"another than {row.request_id}"),
)


class RowLink:
    """`share` of the rows are not what was sent."""

    def __init__(self, rng: Random, share: float) -> None:
        self._rng, self.share = rng, share
        self.num_refused = 0  # by readers

    async def carry(self, rows: AsyncIterator[CommittedRow]) -> AsyncIterator[CommittedRow]:
        """Rows as they arrive."""
        before: CommittedRow | None = None
        async for row in rows:
            mixed_up = self._rng.random() < self.share
            yield self._rng.choice(WAYS)(row, before or row) if mixed_up else row
            before = row
