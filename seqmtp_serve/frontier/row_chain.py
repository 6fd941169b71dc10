"""Whether committed rows follow one from the other: asked of rows that another process sent, before anyone sees them.

A row says its place: request, epoch, version, and the ancestry digest after it. What a digest covers is the tokens and
where each row ends; that a row is the last, and why, is judged from the text by who shows it.
"""

from __future__ import annotations

from seqmtp_serve.errors import AncestryMismatch, Fenced, ProtocolError, StaleVersion
from seqmtp_serve.frontier.ancestry import extend_digest, initial_digest
from seqmtp_serve.ports import Snapshot
from seqmtp_serve.request import CommittedRow, Ref, Request


class RowChain:
    """One reading of a request's rows, from the first on. A row that is refused changes nothing."""

    def __init__(self, request: Request) -> None:
        self._request_id = request.request_id
        self._epoch = 1  # the first that anybody can own
        self._version = 0
        self._digest = initial_digest(request.prompt_ids)

    @property
    def ref(self) -> Ref:
        """The state after the rows so far; the epoch is that of the last one's owner."""
        return Ref(request_id=self._request_id, epoch=self._epoch, version=self._version, digest=self._digest)

    def take(self, row: CommittedRow) -> None:
        """Go on to `row`.

        Raises ProtocolError for a row of another request, StaleVersion unless its version is the next one, Fenced for
        an epoch that had passed when the row before was committed, AncestryMismatch when its digest is not that of the
        prompt and all tokens up to its last.
        """
        if row.request_id != self._request_id:
            raise ProtocolError(f"{self._request_id}: a row of {row.request_id!r}")
        if row.version != self._version + 1:
            raise StaleVersion(f"{self._request_id}: row {row.version} after row {self._version}")
        if row.epoch < self._epoch:
            raise Fenced(f"{self._request_id}: row {row.version} is of epoch {row.epoch}, after {self._epoch}")
        digest = extend_digest(self._digest, row.tokens)
        if row.digest != digest:
            raise AncestryMismatch(f"{self._request_id}: row {row.version} does not follow from the rows before it")
        self._version, self._epoch, self._digest = row.version, row.epoch, digest


def check_record(record: Snapshot) -> None:
    """Raises what `RowChain.take` raises unless these are the rows of the record, all of them."""
    chain = RowChain(record.request)
    for row in record.rows:
        chain.take(row)
    if (chain.ref.version, chain.ref.digest) != (record.version, record.digest):
        raise AncestryMismatch(f"{record.request.request_id}: the record's rows do not lead to its digest")
