"""Deltas to an HTTP answer: one JSON body, or server-sent events with one chunk for each committed row.

The order of a stream: role chunk (chat), a chunk for each row that shows text, a finish chunk without text, a usage
chunk (`choices: []`), `[DONE]`. A row whose text is held back (a stop string or a character may be forming) sends no
chunk of its own (but for its log-probabilities, where they are asked for): its text comes with a later row. Every event
has an id, from which a client goes on (`cursor.py`).
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from seqmtp_serve.errors import InternalError, SeqMTPError
from seqmtp_serve.ports import Snapshot
from seqmtp_serve.request import FinishReason
from services.gateway.choice import ChoiceText, Delta
from services.gateway.cursor import Cursor, Progress, Tail
from services.gateway.job import Job
from services.gateway.logprobs import ScoredToken, prompt_logprobs, with_top
from services.gateway.problems import problem_body
from services.gateway.shapes import Shape
from services.gateway.tally import Tally
from services.gateway.tools.parser import CallPart, joined

LOGGER = logging.getLogger("seqmtp.gateway")
DONE = "data: [DONE]\n\n"


async def whole_answer(job: Job, shape: Shape, deltas: AsyncGenerator[Delta, None]) -> dict[str, Any]:
    """The answer as one object, once every choice has finished."""
    tally, parts = Tally(job), [_Choice(job, index) for index in range(len(job.choices))]
    choices: list[dict[str, Any]] = [{}] * len(job.choices)
    async with contextlib.aclosing(deltas):
        async for delta in deltas:
            index, row = delta.index, delta.row
            tally.add(row, delta.num_reasoning)
            parts[index].add(delta)
            if row.finish is not None:
                choices[index] = parts[index].whole(shape, row.finish, row.stop_reason)
    return {**_head(job, shape.whole_name), "choices": choices, "usage": tally.usage(), "metrics": tally.metrics()}


async def event_stream(
    job: Job, shape: Shape, deltas: AsyncGenerator[Delta, None], after: Cursor | None = None
) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events, without those that a client at `after` has.

    An error after the first event becomes an event, then `[DONE]`; both under the id of what came before, so that a
    client may try to go on from there.
    """
    chunks = _Chunks(job, shape, after)
    try:
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                if events := chunks.of(delta):
                    yield b"".join(events)  # one write passes all layers of the server once
        yield b"".join(chunks.tail())
        return
    except SeqMTPError as error:
        yield encode_event(str(chunks.cursor), problem_body(error))
    except Exception as error:
        LOGGER.exception("stream %s failed", job.id)
        yield encode_event(str(chunks.cursor), problem_body(InternalError(f"An unforeseen {type(error).__name__}.")))
    yield f"id: {chunks.cursor}\n{DONE}".encode()


def partial_answer(job: Job, shape: Shape, records: Sequence[Snapshot], texts: Sequence[ChoiceText]) -> dict[str, Any]:
    """What the records hold now, as one object with a `status`; choices that go on have no finish reason."""
    tally, choices = Tally(job), []
    for index, (record, text) in enumerate(zip(records, texts, strict=True)):
        part, stop_reason = _Choice(job, index), None
        for row in record.rows:
            if row.tokens:
                delta = text.delta(index, row)
                tally.add(row, delta.num_reasoning)
                part.add(delta)
            stop_reason = row.stop_reason
        choices.append(part.whole(shape, record.finish, stop_reason))
    head = {**_head(job, shape.whole_name), "status": status_of(records)}
    return {**head, "choices": choices, "usage": tally.usage(), "metrics": tally.metrics()}


def status_of(records: Sequence[Snapshot]) -> str:
    """OpenAI's word for where a background answer is. Pure."""
    finishes = {record.finish for record in records}
    if None in finishes:
        return "in_progress" if any(record.version for record in records) else "queued"
    for finish, word in ((FinishReason.ERROR, "failed"), (FinishReason.CANCELLED, "cancelled")):
        if finish in finishes:
            return word
    return "completed"


class _Choice:
    """One choice of an answer that is given at once."""

    def __init__(self, job: Job, index: int) -> None:
        self._job, self._index = job, index
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._scored: list[ScoredToken] = []
        self._prompt: list[dict[str, Any] | None] = []
        self._calls: tuple[CallPart, ...] = ()
        self._finish: str | None = None

    def add(self, delta: Delta) -> None:
        """Take what one row adds."""
        if delta.prompt is not None:
            text, scored = echoed(self._job, delta)
            self._texts.append(text)
            self._scored += scored or ()
            self._prompt = prompt_logprobs(delta.prompt.scored, self._job.prompt_logprobs or 0)
        self._texts.append(delta.text)
        self._reasoning += delta.reasoning
        self._scored += delta.scored
        self._calls = joined((self._calls, *delta.calls))
        self._finish = finish_word(delta)

    def whole(self, shape: Shape, finish: FinishReason | None, stop_reason: str | int | None) -> dict[str, Any]:
        """The choice as the dialect has it."""
        scored = None if self._job.choices[self._index].params.logprobs is None else self._scored
        word = self._finish or (finish and finish.value)
        text, reasoning = "".join(self._texts), "".join(self._reasoning)
        choice = shape.whole(self._index, text, word, stop_reason, scored, self._calls, reasoning)
        return choice | ({} if self._job.prompt_logprobs is None else {"prompt_logprobs": self._prompt})


def finish_word(delta: Delta) -> str | None:
    """Why the choice ended, in OpenAI's words; None while it goes on."""
    finish = delta.row.finish
    return "tool_calls" if delta.num_calls and finish is FinishReason.STOP else finish and finish.value


def echoed(job: Job, delta: Delta) -> tuple[str, tuple[ScoredToken, ...] | None]:
    """What of the prompt the answer begins with: its text, and its tokens where log-probabilities are asked for."""
    num_top = job.choices[delta.index].params.logprobs
    if delta.prompt is None or not job.echo:
        return "", None if num_top is None else ()
    return delta.prompt.text, None if num_top is None else with_top(delta.prompt.scored, num_top)


class _Chunks:
    """The chunks of one job, delta by delta."""

    def __init__(self, job: Job, shape: Shape, after: Cursor | None) -> None:
        self._job, self._shape = job, shape
        self._head = _head(job, shape.chunk_name)
        seen = (None,) * len(job.choices) if after is None else after.positions
        self._progress = [Progress(position) for position in seen]
        self._opened = [False] * len(job.choices)
        self._tally = Tally(job)
        self._seen_tail: Tail = "" if after is None else after.tail
        self._last_version = 0

    @property
    def cursor(self) -> Cursor:
        """Where a client is that has every event so far."""
        places = zip(self._progress, self._opened, strict=True)
        positions = tuple(progress.position if opened else None for progress, opened in places)
        return Cursor(job_id=self._job.id, positions=positions)

    def of(self, delta: Delta) -> list[bytes]:
        """The events of one committed row that the client lacks."""
        row, progress = delta.row, self._progress[delta.index]
        self._tally.add(row, delta.num_reasoning)
        self._last_version = row.version
        events = []
        if not self._opened[delta.index]:
            self._opened[delta.index] = True
            opening = self._shape.opening(delta.index)
            if self._job.echo:
                opening = self._shape.part(delta.index, *echoed(self._job, delta))
            if opening and progress.opening_is_new:
                events.append(self._event([opening], 0))
        num_seen = progress.advance(row.version, row.tokens)
        text = "".join(delta.texts[num_seen:])
        calls, reasoning = joined(delta.calls[num_seen:]), "".join(delta.reasoning[num_seen:])
        trace = {"seqmtp": trace_of(delta)} if self._job.trace and num_seen < len(row.tokens) else {}
        scored = delta.scored[num_seen:]
        if text or trace or scored or calls or reasoning:
            asked = self._job.choices[delta.index].params.logprobs is not None
            part = self._shape.part(delta.index, text, scored if asked else None, calls, reasoning)
            events.append(self._event([part], row.version, **trace))
        if row.finish is not None:
            ending_is_new = progress.ending_is_new
            progress.end()
            if ending_is_new:
                ending = self._shape.ending(delta.index, finish_word(delta), row.stop_reason)
                events.append(self._event([ending], row.version))
        return events

    def tail(self) -> list[bytes]:
        """The usage chunk, where it was asked for, and `[DONE]`."""
        cursor, events = self.cursor, []
        seen = self._seen_tail or all(progress.all_was_seen for progress in self._progress)
        if self._job.include_usage and not seen:
            usage = self._data([], self._last_version, usage=self._tally.usage(), metrics=self._tally.metrics())
            events.append(encode_event(str(replace(cursor, tail="usage")), usage))
        return [*events, f"id: {replace(cursor, tail='done')}\n{DONE}".encode()]

    def _event(self, choices: list[dict[str, Any]], version: int, **more: Any) -> bytes:
        return encode_event(str(self.cursor), self._data(choices, version, **more))

    def _data(self, choices: list[dict[str, Any]], version: int, **more: Any) -> dict[str, Any]:
        if self._job.include_usage:
            more = {"usage": self._tally.usage() if self._job.continuous_usage else None} | more
        return {**self._head, "sequence_number": version, "choices": choices, **more}


def trace_of(delta: Delta) -> dict[str, Any]:
    """The row in the request's ledger: where its tokens came from, what its step cost, and why it was this deep.

    The last two come with a live row only: the record does not hold them.
    """
    row = delta.row
    return {
        "version": row.version,
        "origins": row.origins,
        "tokens": list(row.tokens),
        "pieces": list(delta.pieces),
        "drafted": row.drafted,
        "accepted": row.accepted,
        **({"timings_ms": row.timings_ms, "depth_reason": row.depth_reason} if row.timings_ms else {}),
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
