"""How requests end here other than by a row of their own: cancelled, refused by the record, or given up."""

from __future__ import annotations

from collections.abc import Callable

from seqmtp_serve.errors import ContextOverflow, SeqMTPError
from seqmtp_serve.frontier.ledger import Ledger
from seqmtp_serve.frontier.round import State
from seqmtp_serve.frontier.scheduler import BatchScheduler
from seqmtp_serve.frontier.sequence import Sequence
from seqmtp_serve.live_requests import LiveRequests
from seqmtp_serve.ports import Snapshot
from seqmtp_serve.request import FinishReason, Ref


class Endings:
    """Takes a sequence out of the scheduler and tells its readers, both or neither. `ended` is called after each."""

    def __init__(
        self,
        scheduler: BatchScheduler,
        requests: LiveRequests,
        ledger: Ledger,
        ended: Callable[[], None],
    ) -> None:
        self._scheduler, self._requests, self._ledger = scheduler, requests, ledger
        self._ended = ended

    def with_error(self, sequence: Sequence, error: SeqMTPError) -> None:
        """It goes no further here; what is committed stays in the record, and its readers meet `error`."""
        self._scheduler.drop(sequence)
        self._requests.end(sequence.request.request_id, error)
        self._ended()

    def cancelled(self, sequence: Sequence) -> None:
        """The record was cancelled by us."""
        self._scheduler.drop(sequence)
        self._as(sequence.frontier.ref, FinishReason.CANCELLED)

    def as_recorded(self, sequence: Sequence, snapshot: Snapshot) -> None:
        """The record has ended without us: readers get the rows they lack, and its end."""
        self._scheduler.drop(sequence)
        for row in snapshot.rows[sequence.frontier.version :]:
            self._requests.append(row)
        assert snapshot.finish is not None, "only a record that ended ends a request"
        last = max(snapshot.ref, sequence.frontier.ref, key=lambda ref: ref.version)
        self._as(last, snapshot.finish)

    def unfit(self) -> None:
        """End what waits and can never fit on the group there is now."""
        for sequence in list(self._scheduler.waiting):
            try:
                self._scheduler.fits(sequence.request)
            except ContextOverflow as error:
                self.with_error(sequence, error)

    def everyone(self, error: SeqMTPError) -> None:
        """End all but those whose row is being committed: they are not lost yet."""
        for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
            if sequence.state is not State.COMMITTING:
                self.with_error(sequence, error)

    def _as(self, ref: Ref, finish: FinishReason) -> None:
        if ref.request_id not in self._requests:  # the record's answer and the canceller's both tell of it
            return
        self._ledger.count(f"finished.{finish}")
        self._requests.end_as(ref, finish)
        self._ended()
