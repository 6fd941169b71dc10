"""Recovery is replay: prompt and committed rows go to a target as one prefill. Workers are disposable, the record not.

One path serves a lost target, a preemption, a refused row and a coordinator that takes over another's request.
"""

from __future__ import annotations

from collections.abc import Sequence

from seqmtp_serve.errors import AncestryMismatch, StoreBehind
from seqmtp_serve.frontier.ancestry import extend_digest
from seqmtp_serve.frontier.frontier import Frontier
from seqmtp_serve.ports import Admit, Commit, Snapshot
from seqmtp_serve.request import CommittedRow, Request


def frontier_from(snapshot: Snapshot) -> Frontier:
    """Rebuild the frontier from a complete snapshot, row by row, and check it against the record's own digest.

    Raises StoreBehind when rows are missing and AncestryMismatch when they are not the rows that were committed.
    """
    if [row.version for row in snapshot.rows] != list(range(1, snapshot.version + 1)):
        raise StoreBehind(f"{snapshot.request.request_id}: the record's rows do not reach version {snapshot.version}")
    frontier = Frontier.start(snapshot.request, snapshot.epoch)
    for row in snapshot.rows:
        frontier = frontier.advance(row.tokens, finished=row.finish is not None)
    if frontier.digest != snapshot.digest:
        raise AncestryMismatch(f"{snapshot.request.request_id}: the record's rows do not hash to its digest")
    return frontier


def admission(request: Request, frontier: Frontier) -> Admit:
    """What a target needs to build the state of `frontier`, new or replayed alike."""
    return Admit(ref=frontier.ref, request=request, output_ids=frontier.output_ids)


def commits_after(version: int, digest: bytes, rows: Sequence[CommittedRow], epoch: int) -> list[Commit]:
    """The commits that bring a record from `version`, where its digest is `digest`, to the end of `rows`."""
    commits: list[Commit] = []
    for row in rows[version:]:
        digest = extend_digest(digest, row.tokens)
        commits.append(Commit(epoch=epoch, row=row, digest=digest))
    return commits
