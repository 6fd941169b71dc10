"""What every stream of a response's typed events shares: numbers, ids and the event that ends it badly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from seqmtp_serve.errors import SeqMTPError
from services.gateway.choice import Delta
from services.gateway.cursor import Cursor, Position, Progress
from services.gateway.job import Job
from services.gateway.problems import problem_body
from services.gateway.tally import Tally


class EventWriter:
    """The events of one response. Each has a number, and an id: the cursor of `cursor.py` and that number."""

    def __init__(self, job: Job, seen: Position | None) -> None:
        """`seen`: up to which token a client is, whose tokens are checked."""
        self._job = job
        self._progress = Progress(seen)
        self._tally = Tally(job)
        self._number = -1

    def of(self, delta: Delta) -> Iterator[bytes]:
        """The events of one committed row that the client lacks."""
        raise NotImplementedError

    def failed(self, error: SeqMTPError) -> bytes:
        """The event that ends a stream whose generation went wrong; it has the number of what came before."""
        problem = problem_body(error)["error"]
        told = {"code": problem["code"], "message": problem["message"], "param": problem["param"]}
        return self._encode("error", told)

    def _event(self, name: str, **data: Any) -> bytes:
        return self._encode(f"response.{name}", data)

    def _encode(self, kind: str, data: dict[str, Any]) -> bytes:
        number = max(self._number, 0)
        body = json.dumps({"type": kind, "sequence_number": number, **data}, ensure_ascii=False, separators=(",", ":"))
        cursor = Cursor(job_id=self._job.id, positions=(self._progress.position,))
        return f"id: {cursor}:{number}\nevent: {kind}\ndata: {body}\n\n".encode()
