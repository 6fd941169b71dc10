"""A response of several items as events whose numbers follow from its tokens, however those are cut into rows.

0 response.created   1 response.in_progress
2 + 64 t + k         event k of token t; deltas of one item in one row become one, with the number of its last token
2 + 64 T + k         what closes the last item, then response.completed (or .incomplete); T tokens in all
"""

from __future__ import annotations

from collections.abc import Iterator

from services.gateway.choice import Delta
from services.gateway.cursor import Position
from services.gateway.event_writer import EventWriter
from services.gateway.job import Job
from services.gateway.response_items import Event, OutputItems
from services.gateway.response_object import response_object, status_after

NUM_BEGINNING = 2
STRIDE = 64  # events that a token can bring; of more, which no tokenizer has, the rest share the last number


def last_number(num_tokens: int, *, ended: bool) -> int:
    """No event of these tokens has a higher number."""
    return NUM_BEGINNING + STRIDE * (num_tokens + ended) - 1


class ItemEvents(EventWriter):
    """`seen_number`: events up to it are the client's; -1: none."""

    def __init__(self, job: Job, seen_number: int = -1, seen: Position | None = None) -> None:
        super().__init__(job, seen)
        self._seen_number, self._num_tokens = seen_number, 0
        self._items = OutputItems(job)

    def of(self, delta: Delta) -> Iterator[bytes]:
        row = delta.row
        if self._number < 0:
            fresh = {"response": response_object(self._job, "in_progress")}
            begun = [(number, Event(name=name, data=fresh)) for number, name in enumerate(("created", "in_progress"))]
            yield from self._written(begun)
        self._progress.advance(row.version, row.tokens)
        self._tally.add(row, delta.num_reasoning)
        numbered = [pair for events in self._items.of(delta) for pair in self._numbered(events)]
        yield from self._written(numbered)
        if row.finish is not None:
            self._progress.end()
            status = status_after(row.finish)
            endings = self._items.end(status)
            over = response_object(self._job, status, self._items.items, self._tally)
            yield from self._written(self._numbered([*endings, Event(name=status, data={"response": over})]))

    def _numbered(self, events: list[Event]) -> list[tuple[int, Event]]:
        """The events of the next token."""
        first = NUM_BEGINNING + STRIDE * self._num_tokens
        self._num_tokens += 1
        return [(first + min(place, STRIDE - 1), event) for place, event in enumerate(events)]

    def _written(self, numbered: list[tuple[int, Event]]) -> Iterator[bytes]:
        """Those that the client lacks, deltas that follow each other as one."""
        merged: list[tuple[int, Event]] = []
        for number, event in numbered:
            if number <= self._seen_number:
                continue
            if merged and event.continues(merged[-1][1]):
                event = merged.pop()[1] + event
            merged.append((number, event))
        for self._number, event in merged:
            yield self._encode(f"response.{event.name}", event.data)
        if numbered:
            self._number = max(self._number, numbered[-1][0])
