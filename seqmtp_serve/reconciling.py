"""The record did not take our row: either it went on without us, or the store lost rows that we still have.

A store that was restarted or failed over may lag behind what it acknowledged. The owner has every committed row in
memory, so it takes the record up again under a higher epoch, commits the missing rows once more, and goes on. A record
that another owner has moved on, or that holds other rows than ours, ends the request here with the error that says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from seqmtp_serve.endings import Endings
from seqmtp_serve.errors import AncestryMismatch, Fenced, SeqMTPError, StaleVersion
from seqmtp_serve.frontier.ancestry import initial_digest
from seqmtp_serve.frontier.ledger import Ledger
from seqmtp_serve.frontier.recovery import commits_after
from seqmtp_serve.frontier.scheduler import BatchScheduler
from seqmtp_serve.frontier.sequence import Sequence
from seqmtp_serve.live_requests import LiveRequests
from seqmtp_serve.ports import CommitResult, Snapshot
from seqmtp_serve.store_link import StoreLink


class Reconciling:
    """Brings one sequence and its record together again, or ends the sequence. `resumed` is called when it goes on."""

    def __init__(
        self,
        scheduler: BatchScheduler,
        requests: LiveRequests,
        store: StoreLink,
        endings: Endings,
        ledger: Ledger,
        resumed: Callable[[], None],
    ) -> None:
        self._scheduler, self._requests, self._store = scheduler, requests, store
        self._endings, self._ledger, self._resumed = endings, ledger, resumed

    def let_go(self, sequence: Sequence) -> None:
        """Give its pages and drafts up at once, whatever `reconcile` finds: nothing runs under a doubtful epoch."""
        self._scheduler.drop(sequence)

    async def reconcile(self, sequence: Sequence) -> None:
        """Read the record and act on it. The sequence was let go; its row that was refused has never been shown."""
        request_id = sequence.request.request_id
        try:
            snapshot = await self._store.snapshot(request_id, 0)
            if snapshot is not None and snapshot.finish is not None and self._has_ours(sequence, snapshot):
                self._endings.as_recorded(sequence, snapshot)
            else:
                self._require_ours(sequence, snapshot)
                await self._restore(sequence, snapshot)
        except SeqMTPError as error:
            self._endings.with_error(sequence, error)

    def _require_ours(self, sequence: Sequence, snapshot: Snapshot | None) -> None:
        """Raises Fenced, StaleVersion or AncestryMismatch unless the record is an earlier state of our own."""
        ours = sequence.frontier
        if snapshot is None:
            return
        if snapshot.epoch > ours.epoch:
            raise Fenced(f"{ours.request_id} is owned by a newer epoch")
        if snapshot.version > ours.version:
            raise StaleVersion(f"{ours.request_id}: the record is at version {snapshot.version}, we at {ours.version}")
        if not self._has_ours(sequence, snapshot):
            raise AncestryMismatch(f"{ours.request_id}: the record holds other rows than were committed here")

    def _has_ours(self, sequence: Sequence, snapshot: Snapshot) -> bool:
        """Whether the record and what was shown here agree as far as both go."""
        ours = self._requests.rows(sequence.request.request_id)
        return all(theirs == row for theirs, row in zip(snapshot.rows, ours, strict=False))

    async def _restore(self, sequence: Sequence, snapshot: Snapshot | None) -> None:
        """Own the record anew, commit what it lost, and queue the request for a replay."""
        request, epoch = sequence.request, sequence.frontier.epoch
        seen, version = (0, 0) if snapshot is None else (snapshot.epoch, snapshot.version)
        digest = initial_digest(request.prompt_ids) if snapshot is None else snapshot.digest
        meta = self._requests.meta(request.request_id)
        taken = await self._store.acquire(request, meta, seen_epoch=seen, above=epoch, patiently=True)
        if not taken.acquired:
            raise Fenced(f"{request.request_id} was taken over meanwhile")
        rows = self._requests.rows(request.request_id)
        commits = commits_after(version, digest, rows, taken.epoch)
        for answer in await self._store.commit(commits) if commits else ():
            if answer not in (CommitResult.OK, CommitResult.DUP):
                raise Fenced(f"{request.request_id} was taken over meanwhile: {answer}")
        if request.request_id not in self._requests:
            return  # cancelled, or this coordinator is stopping
        self._ledger.count("restored_rows", len(commits))
        whole = replace(taken, version=len(rows), rows=rows, digest=sequence.frontier.digest)
        self._scheduler.add(self._requests.restart(whole, sequence.arrival))
        self._resumed()
