"""A response at one moment: whole, or as far as its record goes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from seqmtp_serve.errors import InternalError
from seqmtp_serve.ports import Snapshot
from services.gateway.answer import status_of
from services.gateway.choice import ChoiceText, Delta
from services.gateway.job import Job
from services.gateway.logprobs import ScoredToken
from services.gateway.response_items import OutputItems
from services.gateway.response_object import (
    has_items,
    logprobs_of,
    message_item,
    response_object,
    status_after,
    text_part,
)
from services.gateway.tally import Tally


async def whole_response(job: Job, deltas: AsyncGenerator[Delta, None]) -> dict[str, Any]:
    """The response once its text is over."""
    so_far, finish = _SoFar(job), None
    async with contextlib.aclosing(deltas):
        async for delta in deltas:
            so_far.add(delta)
            finish = delta.row.finish
    assert finish is not None, "deltas end with the row that finishes them, or an error"
    status = status_after(finish)
    return response_object(job, status, so_far.output(status), so_far.tally)


def response_as_it_is(job: Job, record: Snapshot, text: ChoiceText) -> dict[str, Any]:
    """What the record holds now."""
    so_far = _SoFar(job)
    for row in record.rows:
        if row.tokens:
            so_far.add(text.delta(0, row))
    status = status_of([record])
    if status == "completed" and record.finish is not None:
        status = status_after(record.finish)
    item_status = "incomplete" if status in ("failed", "cancelled") else status
    output = so_far.output(item_status) if record.version else []
    error = InternalError("The generation was ended before its text was.") if status == "failed" else None
    return response_object(job, status, output, so_far.tally if record.finish is not None else None, error)


class _SoFar:
    """The rows of one response, taken together."""

    def __init__(self, job: Job) -> None:
        self._job, self.tally = job, Tally(job)
        self._items = OutputItems(job) if has_items(job) else None
        self._shown: list[str] = []
        self._scored: list[ScoredToken] = []

    def add(self, delta: Delta) -> None:
        """Take what one row adds."""
        self.tally.add(delta.row, delta.num_reasoning)
        if self._items is not None:
            for _ in self._items.of(delta):
                pass
            return
        self._shown.append(delta.text)
        self._scored += delta.scored

    def output(self, status: str) -> list[dict[str, Any]]:
        """The output items; the last one has this status. Nothing can be added after it."""
        if self._items is None:
            part = text_part("".join(self._shown), logprobs_of(self._scored))
            return [message_item(self._job, status, [part])]
        self._items.end(status)
        return self._items.items
