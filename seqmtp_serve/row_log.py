"""The committed rows of one live request, for any number of readers, each at its own pace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from seqmtp_serve.errors import SeqMTPError
from seqmtp_serve.request import CommittedRow


class RowLog:
    """Rows in version order, then an end. Nothing enters before it is in the record. One event loop."""

    def __init__(self, rows: Iterable[CommittedRow] = ()) -> None:
        self._rows = list(rows)
        self._error: SeqMTPError | None = None
        self._ended = False
        self._changed = asyncio.Event()

    @property
    def rows(self) -> tuple[CommittedRow, ...]:
        """All rows so far."""
        return tuple(self._rows)

    def append(self, row: CommittedRow) -> None:
        """Hand a row to every reader. A row with `finish` is the last."""
        assert not self._ended, "a row came after the end"
        self._rows.append(row)
        self._ended = row.finish is not None
        self._wake()

    def end(self, error: SeqMTPError) -> None:
        """No row follows, for a reason that is not in the record: readers meet `error` after the last row."""
        if not self._ended:
            self._ended, self._error = True, error
            self._wake()

    async def read(self, after_version: int = 0) -> AsyncIterator[CommittedRow]:
        """Rows above `after_version`, past and coming; then returns, or raises the error the log ended with."""
        index = 0
        while True:
            while index < len(self._rows):
                row = self._rows[index]
                index += 1
                if row.version > after_version:
                    yield row
            if self._ended:
                if self._error is not None:
                    raise self._error
                return
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
