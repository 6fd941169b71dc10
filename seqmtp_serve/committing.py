"""From chosen rows to rows that readers see: all of a step committed at once, then those that are in the record."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from seqmtp_serve.endings import Endings
from seqmtp_serve.errors import SeqMTPError, StoreError
from seqmtp_serve.fault_points import FaultPoint, Reached
from seqmtp_serve.frontier.ledger import Ledger
from seqmtp_serve.frontier.scheduler import BatchScheduler
from seqmtp_serve.frontier.sequence import Sequence
from seqmtp_serve.frontier.turnover import Turnover
from seqmtp_serve.live_requests import LiveRequests
from seqmtp_serve.ports import Commit, CommitResult
from seqmtp_serve.settling import Chosen
from seqmtp_serve.store_link import StoreLink


class Committing:
    """Nothing is shown before its commit was answered OK or DUP. `refused` takes each sequence that lost its record."""

    def __init__(
        self,
        scheduler: BatchScheduler,
        requests: LiveRequests,
        store: StoreLink,
        endings: Endings,
        ledger: Ledger,
        turnover: Turnover,
        *,
        refused: Callable[[Sequence], None],
        clock: Callable[[], float],
        reached: Reached,
    ) -> None:
        self._scheduler, self._requests, self._store = scheduler, requests, store
        self._endings, self._ledger, self._turnover = endings, ledger, turnover
        self._refused, self._clock, self._reached = refused, clock, reached
        self._cancelled: set[str] = set()

    def cancel_after(self, request_id: str) -> None:
        """End the request as cancelled once the row that is being committed has its answer."""
        self._cancelled.add(request_id)

    async def commit(self, chosen: list[Chosen]) -> float:
        """Commit all rows of a step at once, then show those that are in the record. Returns milliseconds."""
        started = self._clock()
        commits = [Commit(epoch=one.row.epoch, row=one.row, digest=one.row.digest) for one in chosen]
        if commits:
            self._reached(FaultPoint.BEFORE_COMMIT)
            try:
                answers: Iterable[CommitResult | SeqMTPError] = await self._store.commit(commits)
            except StoreError as error:
                answers = [error] * len(commits)
            self._reached(FaultPoint.AFTER_COMMIT)
            for one, answer in zip(chosen, answers, strict=True):
                self._answered(one, answer)
        return 1e3 * (self._clock() - started)

    def _answered(self, one: Chosen, answer: CommitResult | SeqMTPError) -> None:
        """OK or DUP: the row is in the record, so it may be seen. Anything else: the record goes on without us."""
        sequence, row, result = one
        cancelled = row.request_id in self._cancelled
        self._cancelled.discard(row.request_id)
        if isinstance(answer, SeqMTPError):
            self._endings.with_error(sequence, answer)
        elif answer in (CommitResult.OK, CommitResult.DUP):
            self._ledger.count("commits.dup", int(answer is CommitResult.DUP))
            note = sequence.note(row)
            self._scheduler.committed(sequence, row)
            self._reached(FaultPoint.AFTER_PUBLISH)
            row.timings_ms["committed_at"] = 1e3 * self._clock()
            self._ledger.record_row(row, result)
            self._requests.notes.add(row.request_id, note)
            self._requests.append(row)
            if row.finish is not None:
                self._turnover.ended(self._clock())
            if cancelled and row.finish is None:
                self._endings.cancelled(sequence)
        else:
            self._ledger.count(f"commits.{answer.lower()}")
            self._refused(sequence)
