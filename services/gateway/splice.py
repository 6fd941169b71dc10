"""A stream of rows that was cut and is read again from its first row: only what was not given yet goes on.

The rows of one reading follow one from the other (`seqmtp_serve/frontier/row_chain.py`). With those of the one before
they are matched by their tokens, not by versions and digests: a record that fell behind and was generated again holds
the same text in rows that may be cut otherwise. Another text ends the stream.
"""

from __future__ import annotations

from dataclasses import replace

from seqmtp_serve.errors import StoreBehind
from seqmtp_serve.request import CommittedRow


class Splice:
    """Remembers the tokens given of one request."""

    def __init__(self) -> None:
        self._given: list[int] = []
        self._place = 0  # in the current reading

    @property
    def began(self) -> bool:
        """Whether anything was given."""
        return bool(self._given)

    def read_again(self) -> None:
        """The next row is the first one."""
        self._place = 0

    def take(self, row: CommittedRow) -> CommittedRow | None:
        """What of this row is new; None when nothing is.

        Raises StoreBehind when the record is another text than was given.
        """
        known = self._given[self._place : self._place + len(row.tokens)]
        if tuple(known) != row.tokens[: len(known)]:
            raise StoreBehind(
                f"{row.request_id}: its record was generated again, and is another text from row {row.version}"
            )
        self._place += len(row.tokens)
        new = row.tokens[len(known) :]
        if not new and row.finish is None:
            return None
        if row.finish is not None and self._place < len(self._given):
            raise StoreBehind(f"{row.request_id}: its record ended before what was given")
        self._given += new
        if not known:
            return row
        return replace(row, tokens=new, origins=row.origins[len(known) :], logprobs=row.logprobs[len(known) :])
