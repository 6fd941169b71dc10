"""The frontier store in one process: the same answers as the scripts in `services/store/*.lua`, and their oracle.

Durable only as long as the process. Every method answers at once and is atomic: asyncio runs it without a break.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic

from seqmtp_serve.frontier.ancestry import initial_digest
from seqmtp_serve.ports import Commit, CommitResult, Snapshot
from seqmtp_serve.request import CommittedRow, FinishReason, Request

REPLAY_WINDOW_S = 600.0


@dataclass(slots=True, kw_only=True)
class _Record:
    request: Request
    digest: bytes
    meta: Mapping[str, str] = field(default_factory=dict)
    epoch: int = 0
    committed_by: int = 0  # epoch of the last commit
    rows: list[CommittedRow] = field(default_factory=list)
    finish: FinishReason | None = None
    owner: str = ""
    claim: str = ""
    lease_until: float = 0.0
    expires_at: float | None = None


class MemoryFrontierStore:
    """Records by request id. A finished one stays readable for `replay_window_s`, then it is unknown."""

    def __init__(self, *, clock: Callable[[], float] = monotonic, replay_window_s: float = REPLAY_WINDOW_S) -> None:
        self._records: dict[str, _Record] = {}
        self._clock = clock
        self._replay_window_s = replay_window_s

    async def acquire(
        self,
        request: Request,
        owner: str,
        lease_s: float,
        *,
        meta: Mapping[str, str] | None = None,
        seen_epoch: int | None = None,
        above: int = 0,
        claim: str = "",
    ) -> Snapshot:
        """Create or take over. A finished record is returned as it is: there is nothing left to own."""
        record = self._find(request.request_id)
        if record is None:
            digest = initial_digest(request.prompt_ids)
            if seen_epoch:
                return Snapshot(request=request, epoch=0, version=0, digest=digest)
            self._forget_expired()
            record = _Record(request=request, digest=digest, meta=dict(meta or {}))
            self._records[request.request_id] = record
        again = bool(claim) and record.claim == claim
        acquired = record.finish is None and (again or seen_epoch in (None, record.epoch))
        if acquired:
            record.epoch = record.epoch if again else max(record.epoch, above) + 1
            record.owner, record.claim, record.lease_until = owner, claim, self._clock() + lease_s
        return self._snapshot(record, 0, acquired=acquired)

    async def commit(self, commits: Sequence[Commit]) -> Sequence[CommitResult]:
        """Each row on its own, in order; a refused row leaves the others alone."""
        return [self._commit_one(commit) for commit in commits]

    async def cancel(self, request_id: str, *, abandoned_at: int | None = None) -> CommitResult:
        """OK once, then DUP; GONE for an unknown record or one that ended otherwise. No other process reads here."""
        record = self._find(request_id)
        if record is None:
            return CommitResult.GONE
        if record.finish is not None:
            return CommitResult.DUP if record.finish is FinishReason.CANCELLED else CommitResult.GONE
        if abandoned_at not in (None, record.epoch):
            return CommitResult.FENCED
        self._end(record, FinishReason.CANCELLED)
        return CommitResult.OK

    async def snapshot(self, request_id: str, after_version: int = 0) -> Snapshot | None:
        """The record, with rows above `after_version` only."""
        record = self._find(request_id)
        return None if record is None else self._snapshot(record, after_version)

    def _commit_one(self, commit: Commit) -> CommitResult:
        record = self._find(commit.row.request_id)
        if record is None:
            return CommitResult.GONE
        if commit.epoch != record.epoch:
            return CommitResult.FENCED
        version = len(record.rows)
        if commit.row.version == version and (record.committed_by, record.digest) == (commit.epoch, commit.digest):
            return CommitResult.DUP
        if record.finish is not None:
            return CommitResult.GONE
        if commit.row.version != version + 1:
            return CommitResult.CONFLICT
        record.rows.append(replace(commit.row, epoch=commit.epoch, digest=commit.digest))
        record.digest = commit.digest
        record.committed_by = commit.epoch
        if commit.row.finish is not None:
            self._end(record, commit.row.finish)
        return CommitResult.OK

    def _end(self, record: _Record, finish: FinishReason) -> None:
        record.finish = finish
        record.expires_at = self._clock() + self._replay_window_s

    def _find(self, request_id: str) -> _Record | None:
        record = self._records.get(request_id)
        if record is None or (record.expires_at is not None and self._clock() >= record.expires_at):
            return None
        return record

    def _forget_expired(self) -> None:
        now = self._clock()
        self._records = {
            request_id: record
            for request_id, record in self._records.items()
            if record.expires_at is None or now < record.expires_at
        }

    def _snapshot(self, record: _Record, after_version: int, *, acquired: bool = False) -> Snapshot:
        return Snapshot(
            request=record.request,
            epoch=record.epoch,
            version=len(record.rows),
            digest=record.digest,
            rows=tuple(record.rows[after_version:]),
            finish=record.finish,
            owner=record.owner,
            meta=record.meta,
            acquired=acquired,
            lease_left_s=record.lease_until - self._clock(),
        )
