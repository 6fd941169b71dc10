"""A response as OpenAI's typed events, numbered by the record: a resumed stream has the numbers of the first one.

One of text alone is numbered by its rows. For one that may think or call see `response_item_stream.py`.

    0 response.created   1 response.in_progress   2 …output_item.added   3 …content_part.added
    3 + v                …output_text.delta of row v; a row whose text is held back has none, and its number is left out
    3 + V + 1 … + 4      …output_text.done, …content_part.done, …output_item.done, response.completed (or .incomplete)

V is the last row. Each event also has an id, the cursor of `cursor.py` and its number, that says which tokens are out.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any

from seqmtp_serve.errors import InternalError, InvalidField, SeqMTPError
from seqmtp_serve.request import CommittedRow
from services.gateway.choice import Delta
from services.gateway.cursor import HEADER, Position, parse_cursor
from services.gateway.event_writer import EventWriter
from services.gateway.job import Job
from services.gateway.logprobs import ScoredToken
from services.gateway.response_item_stream import ItemEvents
from services.gateway.response_object import (
    has_items,
    item_id,
    logprobs_of,
    message_item,
    response_object,
    status_after,
    text_part,
)

LOGGER = logging.getLogger("seqmtp.gateway")
NUM_OPENING = 4
NUM_ENDING = 4
_ID = re.compile(r"(?P<cursor>.+):(?P<number>\d{1,9})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Up to which event a client is: its number, and which tokens it has (None: the number is all that is known)."""

    number: int
    position: Position | None = None

    @property
    def row(self) -> Position | None:
        """The same for `Progress`: None before the first delta."""
        version = self.number - NUM_OPENING + 1
        return self.position or (Position(version=version) if version > 0 else None)


def seen_of(event_id: str, job_id: str) -> Seen:
    """What a `Last-Event-ID` says. Raises InvalidField."""
    found = _ID.fullmatch(event_id)
    if found is None:
        raise InvalidField(f"'{HEADER}' is not an event id of this server.", param=HEADER)
    cursor = parse_cursor(found["cursor"])
    if cursor.job_id != job_id or len(cursor.positions) != 1:
        raise InvalidField(f"'{HEADER}' names another response.", param=HEADER)
    return Seen(number=int(found["number"]), position=cursor.positions[0])


async def response_events(
    job: Job, deltas: AsyncGenerator[Delta, None], seen: Seen | None = None
) -> AsyncGenerator[bytes, None]:
    """The response as server-sent events, without those that the client has. An error later is the last event."""
    events = _writer(job, seen)
    try:
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                for event in events.of(delta):
                    yield event
        return
    except SeqMTPError as error:
        failure = error
    except Exception as error:
        LOGGER.exception("response %s failed", job.id)
        failure = InternalError(f"An unforeseen {type(error).__name__}.")
    yield events.failed(failure)


def _writer(job: Job, seen: Seen | None) -> EventWriter:
    if not has_items(job):
        return _Events(job, seen)
    return ItemEvents(job) if seen is None else ItemEvents(job, seen.number, seen.position)


class _Events(EventWriter):
    """The events of a response of text alone, row by row."""

    def __init__(self, job: Job, seen: Seen | None) -> None:
        super().__init__(job, None if seen is None else seen.row)
        self._seen = seen
        self._text: list[str] = []
        self._scored: list[ScoredToken] = []

    def of(self, delta: Delta) -> Iterator[bytes]:
        row = delta.row
        if self._number < 0:
            yield from self._opening()
        num_seen = self._progress.advance(row.version, row.tokens)
        self._tally.add(row)
        self._text.append(delta.text)
        self._scored += delta.scored
        self._number = NUM_OPENING - 1 + row.version
        text, scored = "".join(delta.texts[num_seen:]), delta.scored[num_seen:]
        if text or scored:
            yield self._event("output_text.delta", **self._where, delta=text, logprobs=logprobs_of(scored))
        if row.finish is not None:
            self._progress.end()
            yield from self._ending(row)

    def _opening(self) -> Iterator[bytes]:
        fresh = response_object(self._job, "in_progress")
        item = {"output_index": 0, "item": message_item(self._job, "in_progress", [])}
        part = {**self._where, "part": text_part("", [])}
        openings: dict[str, dict[str, Any]] = {
            "created": {"response": fresh},
            "in_progress": {"response": fresh},
            "output_item.added": item,
            "content_part.added": part,
        }
        for name, data in openings.items():
            self._number += 1
            if self._seen is None or self._number > self._seen.number:
                yield self._event(name, **data)

    def _ending(self, row: CommittedRow) -> Iterator[bytes]:
        assert row.finish is not None
        status = status_after(row.finish)
        text, logprobs = "".join(self._text), logprobs_of(self._scored)
        part = text_part(text, logprobs)
        item = message_item(self._job, status, [part])
        over = {"response": response_object(self._job, status, [item], self._tally)}
        endings: dict[str, dict[str, Any]] = {
            "output_text.done": {**self._where, "text": text, "logprobs": logprobs},
            "content_part.done": {**self._where, "part": part},
            "output_item.done": {"output_index": 0, "item": item},
            status: over,
        }
        num_seen = self._num_ending_seen(row.version)
        for place, (name, data) in enumerate(endings.items(), 1):
            self._number += 1
            if place > num_seen:
                yield self._event(name, **data)

    def _num_ending_seen(self, last_version: int) -> int:
        """Endings the client has: its number counts them from its own last row, which lost rows may have moved."""
        if self._seen is None:
            return 0
        version = last_version if self._seen.position is None else self._seen.position.version
        return self._seen.number - (NUM_OPENING - 1) - version

    @property
    def _where(self) -> dict[str, Any]:
        return {"item_id": item_id(self._job), "output_index": 0, "content_index": 0}
