"""Deltas to an HTTP answer: one JSON body, or server-sent events with one chunk for each committed row.

The order of a stream: role chunk (chat), a chunk for each row that shows text, a finish chunk without text, a usage
chunk (`choices: []`), `[DONE]`. A row whose text is held back (a stop string or a character may be forming) sends no
chunk of its own: its text comes with a later row. Every event has `id: <request>:<version>`, the version of the
row it belongs to, so that a reader knows how far it got.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncGenerator
from typing import Any

from seqmtp_serve.errors import InternalError, SeqMTPError
from services.gateway.choice import Delta
from services.gateway.job import Job
from services.gateway.problems import problem_body
from services.gateway.shapes import Shape
from services.gateway.tally import Tally

LOGGER = logging.getLogger("seqmtp.gateway")


async def whole_answer(job: Job, shape: Shape, deltas: AsyncGenerator[Delta, None]) -> dict[str, Any]:
    """The answer as one object, once every choice has finished."""
    tally = Tally(job)
    texts = [""] * len(job.choices)
    choices: list[dict[str, Any]] = [{}] * len(job.choices)
    async with contextlib.aclosing(deltas):
        async for delta in deltas:
            index, row = delta.index, delta.row
            tally.add(row)
            texts[index] += delta.text
            if row.finish is not None:
                choices[index] = shape.whole(index, texts[index], row.finish, row.stop_reason)
    return {**_head(job, shape.whole_name), "choices": choices, "usage": tally.usage(), "metrics": tally.metrics()}


async def event_stream(job: Job, shape: Shape, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events. An error after the first event becomes an event, then `[DONE]`."""
    chunks = _Chunks(job, shape)
    try:
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                for event in chunks.of(delta):
                    yield event
        for event in chunks.tail():
            yield event
    except SeqMTPError as error:
        yield encode_event(chunks.event_id, problem_body(error))
    except Exception as error:
        LOGGER.exception("stream %s failed", job.id)
        yield encode_event(chunks.event_id, problem_body(InternalError(f"An unforeseen {type(error).__name__}.")))
    yield b"data: [DONE]\n\n"


class _Chunks:
    """The chunks of one job, delta by delta."""

    def __init__(self, job: Job, shape: Shape) -> None:
        self._job, self._shape = job, shape
        self._head = _head(job, shape.chunk_name)
        self._opened: set[int] = set()
        self._tally = Tally(job)
        self.event_id = f"{job.id}:0"

    def of(self, delta: Delta) -> list[bytes]:
        """The events of one committed row."""
        row = delta.row
        self._tally.add(row)
        events = []
        if delta.index not in self._opened:
            self._opened.add(delta.index)
            self.event_id = f"{row.request_id}:0"
            if opening := self._shape.opening(delta.index):
                events.append(self._event([opening]))
        self.event_id = f"{row.request_id}:{row.version}"
        trace = {"seqmtp": trace_of(delta)} if self._job.trace else {}
        if delta.text or trace:
            events.append(self._event([self._shape.part(delta.index, delta.text)], **trace))
        if row.finish is not None:
            events.append(self._event([self._shape.ending(delta.index, row.finish, row.stop_reason)]))
        return events

    def tail(self) -> list[bytes]:
        """The usage chunk, where it was asked for."""
        if not self._job.include_usage:
            return []
        return [self._event([], usage=self._tally.usage(), metrics=self._tally.metrics())]

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        if self._job.include_usage:
            more = {"usage": self._tally.usage() if self._job.continuous_usage else None} | more
        return encode_event(self.event_id, {**self._head, "choices": choices, **more})


def trace_of(delta: Delta) -> dict[str, Any]:
    """Where a row's tokens came from: one letter each (b bootstrap, a accepted, c correction, n bonus or plain)."""
    row = delta.row
    return {
        "version": row.version,
        "origins": row.origins,
        "tokens": list(row.tokens),
        "pieces": list(delta.pieces),
        "drafted": row.drafted,
        "accepted": row.accepted,
    }


def encode_event(event_id: str, data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"id: {event_id}\ndata: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def _head(job: Job, name: str) -> dict[str, Any]:
    return {
        "id": job.id,
        "object": name,
        "created": job.created,
        "model": job.model,
        "system_fingerprint": job.system_fingerprint,
    }
