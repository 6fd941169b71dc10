"""The requests that are live in one coordinator: each id's row log, and its sequence once the record is acquired."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from itertools import count

from seqmtp_serve.errors import RequestNotFound, SeqMTPError
from seqmtp_serve.frontier.finish import FinishChecker
from seqmtp_serve.frontier.recovery import frontier_from
from seqmtp_serve.frontier.round_notes import RoundNotes
from seqmtp_serve.frontier.sequence import Sequence, end_row
from seqmtp_serve.ports import Snapshot
from seqmtp_serve.request import CommittedRow, FinishReason, Ref, Request
from seqmtp_serve.row_log import RowLog

Decoder = Callable[[int], str]
CALLER, PRIORITY = "caller", "priority"  # names in a record's meta


class LiveRequests:
    """Readers find a request here from before its record is acquired until its end; then only the store knows it."""

    def __init__(self, decoder_factory: Callable[[Request], Decoder]) -> None:
        self._decoder_factory = decoder_factory
        self._logs: dict[str, RowLog] = {}
        self._meta: dict[str, Mapping[str, str]] = {}
        self._sequences: dict[str, Sequence] = {}
        self._arrivals = count()
        self.notes = RoundNotes()

    def __len__(self) -> int:
        return len(self._logs)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._logs

    def open(self, request_id: str) -> None:
        """Make room for readers, before anything is known."""
        self._logs[request_id] = RowLog()

    def take_up(self, snapshot: Snapshot) -> Sequence | None:
        """Hand over the rows of the record; the sequence that goes on from there, or None when the record has ended.

        The finish checker and the decoder are brought to where the record is. Raises StoreBehind or AncestryMismatch
        for a record that is not whole.
        """
        request = snapshot.request
        self._meta[request.request_id] = snapshot.meta
        for row in snapshot.rows:
            self.append(row)
        if snapshot.finish is not None:
            self.end_as(snapshot.ref, snapshot.finish)
            return None
        return self.restart(snapshot, next(self._arrivals))

    def restart(self, snapshot: Snapshot, arrival: int) -> Sequence:
        """A sequence at a complete snapshot whose rows the readers have. Raises as `take_up` does."""
        request = snapshot.request
        frontier, checker, decode = frontier_from(snapshot), FinishChecker(request), self._decoder_factory(request)
        for token in frontier.output_ids:
            checker.push(token, decode(token))
        sequence = Sequence(
            request=request,
            frontier=frontier,
            checker=checker,
            decode=decode,
            arrival=arrival,
            caller=snapshot.meta.get(CALLER, ""),
            priority=int(snapshot.meta.get(PRIORITY, "0")),
        )
        self._sequences[request.request_id] = sequence
        return sequence

    def get(self, request_id: str) -> Sequence | None:
        """The sequence, while it can still take results."""
        return self._sequences.get(request_id)

    def rows(self, request_id: str) -> tuple[CommittedRow, ...]:
        """The committed rows of a live request, from the first; none for any other."""
        log = self._logs.get(request_id)
        return () if log is None else log.rows

    def meta(self, request_id: str) -> Mapping[str, str]:
        """What is kept with the record of a live request; empty before it was acquired."""
        return self._meta.get(request_id, {})

    def owned(self) -> tuple[Ref, ...]:
        """Where each sequence is, for whoever keeps the leases of their records."""
        return tuple(sequence.frontier.ref for sequence in self._sequences.values())

    def read(self, request_id: str, after_version: int) -> AsyncIterator[CommittedRow]:
        """Rows above a version, past and coming; RequestNotFound when the request is not live here."""
        log = self._logs.get(request_id)
        if log is None:
            raise RequestNotFound(f"{request_id} is not running here")
        return log.read(after_version)

    def append(self, row: CommittedRow) -> None:
        """Show a committed row to whoever is still served here. The last row closes the request."""
        log = self._logs.get(row.request_id)
        if log is not None:
            log.append(row)
            if row.finish is not None:
                self._forget(row.request_id)

    def end_as(self, ref: Ref, finish: FinishReason) -> None:
        """The record ended at `ref` without a row (cancelled): readers get one without tokens, after its last."""
        self.append(end_row(ref, finish))

    def end(self, request_id: str, error: SeqMTPError) -> None:
        """It goes no further here, for a reason outside the record: readers meet `error`."""
        if request_id in self._logs:
            self._logs[request_id].end(error)
            self._forget(request_id)

    def end_all(self, error: SeqMTPError) -> None:
        """Nobody here goes any further."""
        for request_id in list(self._logs):
            self.end(request_id, error)

    def _forget(self, request_id: str) -> None:
        del self._logs[request_id]
        self.notes.end(request_id)
        self._meta.pop(request_id, None)
        self._sequences.pop(request_id, None)
