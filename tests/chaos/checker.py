"""Judges a history: was each stream the text of plain decoding, each token once, none before its commit?

Pure and blind to how the run was made: the simulation, the real processes and the negative controls are all judged by
this one function. It trusts nobody's counters, only what clients received and what the store wrote.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.chaos.history import (
    Claimed,
    ClientEvent,
    Committed,
    Ended,
    FellBack,
    History,
    Invoked,
    Left,
    Received,
    StoreEvent,
)


class Kind(StrEnum):
    """What can be wrong."""

    LOST = "lost"  # a token the client never got, although later ones came
    REPEATED = "repeated"  # a token or row that came twice
    REORDERED = "reordered"  # a row that came after a later one
    ALTERED = "altered"  # a token, a text or an end that plain decoding does not give
    UNCOMMITTED = "emitted before committed"
    VERSION_BACK = "version not in sequence"  # in the record: a version twice, skipped, or lower than before
    EPOCH_BACK = "fenced epoch in the record"  # a row, or a claim, under an epoch that had passed
    TWO_OWNERS = "two owners in one epoch"
    INCOMPLETE = "incomplete"  # the stream has no end, or ended with an error, or too early
    FORGOTTEN = "forgotten"  # a row that was shown is not in the store that was failed over to, against its promise
    LEAKED = "leaked"  # something is still held that was not held before


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One finding. `subject` is a stream, a request or the name of what leaked."""

    kind: Kind
    subject: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.subject}: {self.detail}"


def check(history: History) -> tuple[Violation, ...]:
    """Every violation, streams first. Empty: the run was exactly once, as far as anyone outside can see."""
    by_stream: defaultdict[str, list[ClientEvent]] = defaultdict(list)
    for event in history.clients:
        by_stream[event.stream].append(event)
    found: list[Violation] = []
    for events in by_stream.values():
        found += _check_stream(events, history)
    by_request: defaultdict[str, list[StoreEvent]] = defaultdict(list)
    for entry in history.store:
        by_request[entry.request_id].append(entry)
    for request_id, entries in by_request.items():
        found += _check_record(request_id, entries)
    found += _check_held(history)
    return tuple(found)


# ---- one client's stream -------------------------------------------------------------------------------------------


def _check_stream(events: Sequence[ClientEvent], history: History) -> Iterator[Violation]:
    invoked = events[0]
    assert isinstance(invoked, Invoked), "a stream begins with its invocation"
    rows = [event for event in events if isinstance(event, Received)]
    yield from _check_versions(invoked.stream, rows)
    yield from _check_tokens(invoked, rows)
    yield from _check_committed(invoked, rows, history)
    yield from _check_kept(invoked, rows, history)
    yield from _check_end(invoked, events, rows)


def _check_versions(stream: str, rows: Sequence[Received]) -> Iterator[Violation]:
    """Rows come once each, in order, without a gap."""
    seen: set[int] = set()
    highest = 0
    for row in rows:
        if row.version in seen:
            yield Violation(kind=Kind.REPEATED, subject=stream, detail=f"row {row.version} came again")
        elif row.version < highest:
            yield Violation(kind=Kind.REORDERED, subject=stream, detail=f"row {row.version} came after {highest}")
        seen.add(row.version)
        highest = max(highest, row.version)
    if missing := sorted(set(range(1, highest + 1)) - seen):
        yield Violation(kind=Kind.LOST, subject=stream, detail=f"rows {missing} never came, row {highest} did")


def _check_tokens(invoked: Invoked, rows: Sequence[Received]) -> Iterator[Violation]:
    """The tokens are a beginning of the reference. The first place where they are not is named, and only it."""
    tokens = [token for row in rows for token in row.tokens]
    reference = invoked.reference
    place = next((i for i, token in enumerate(tokens) if i >= len(reference) or token != reference[i]), None)
    if place is None:
        return
    rest = tokens[place:]
    kind = Kind.ALTERED
    for shift in range(1, len(reference) + 1):  # the smallest shift that explains everything that follows
        if place >= shift and _begins_with(reference[place - shift :], rest):
            kind = Kind.REPEATED
            break
        if place + shift < len(reference) and _begins_with(reference[place + shift :], rest):
            kind = Kind.LOST
            break
    expected = reference[place] if place < len(reference) else "the end"
    detail = f"token {place} is {tokens[place]}, plain decoding gives {expected}"
    yield Violation(kind=kind, subject=invoked.stream, detail=detail)


def _begins_with(reference: Sequence[int], tokens: Sequence[int]) -> bool:
    return list(reference[: len(tokens)]) == list(tokens)


def _check_committed(invoked: Invoked, rows: Sequence[Received], history: History) -> Iterator[Violation]:
    """When a row arrived, the log already held a row of this version with these tokens."""
    written: dict[tuple[int, tuple[int, ...]], int] = {}
    for place, entry in enumerate(history.store):
        if isinstance(entry, Committed) and entry.request_id == invoked.request_id:
            written.setdefault((entry.version, entry.tokens), place)
    for row in rows:
        place = written.get((row.version, row.tokens))
        if place is None or place >= row.log_len:
            when = "never entered the record" if place is None else "entered the record later"
            yield Violation(kind=Kind.UNCOMMITTED, subject=invoked.stream, detail=f"row {row.version} {when}")


def _check_kept(invoked: Invoked, rows: Sequence[Received], history: History) -> Iterator[Violation]:
    """What had been shown when another store took over is in its record, where that was promised."""
    for place, entry in enumerate(history.store):
        if isinstance(entry, FellBack) and entry.promised and entry.request_id == invoked.request_id:
            shown = max((row.version for row in rows if row.log_len <= place), default=0)
            if shown > entry.version:
                detail = f"row {shown} was shown, the store that took over has {entry.version}"
                yield Violation(kind=Kind.FORGOTTEN, subject=invoked.stream, detail=detail)


def _check_end(invoked: Invoked, events: Sequence[ClientEvent], rows: Sequence[Received]) -> Iterator[Violation]:
    """One end, the reference's, after the whole of it; unless the client left."""
    if any(isinstance(event, Left) for event in events):
        return
    ends = [event for event in events if isinstance(event, Ended)]
    num_tokens = sum(len(row.tokens) for row in rows)
    if len(ends) != 1:
        yield Violation(kind=Kind.INCOMPLETE, subject=invoked.stream, detail=f"{len(ends)} ends")
    elif ends[0].finish is None:
        yield Violation(kind=Kind.INCOMPLETE, subject=invoked.stream, detail=f"ended with: {ends[0].detail}")
    elif num_tokens < len(invoked.reference):
        detail = f"ended as {ends[0].finish} after {num_tokens} of {len(invoked.reference)} tokens"
        yield Violation(kind=Kind.INCOMPLETE, subject=invoked.stream, detail=detail)
    elif isinstance(events[-1], Received):
        yield Violation(kind=Kind.REPEATED, subject=invoked.stream, detail="a row came after the end")
    elif invoked.finish is not None and ends[0].finish != invoked.finish:
        detail = f"ended as {ends[0].finish}, plain decoding as {invoked.finish}"
        yield Violation(kind=Kind.ALTERED, subject=invoked.stream, detail=detail)
    elif invoked.text is not None and ends[0].text != invoked.text:
        detail = f"the text is {ends[0].text!r}, plain decoding gives {invoked.text!r}"
        yield Violation(kind=Kind.ALTERED, subject=invoked.stream, detail=detail)


# ---- one request's record ------------------------------------------------------------------------------------------


def _check_record(request_id: str, entries: Sequence[StoreEvent]) -> Iterator[Violation]:
    """Versions 1, 2, 3 ...; epochs never go back; one owner an epoch. From where another store took over, again so."""
    version = epoch = 0
    owners: dict[int, str] = {}
    for entry in entries:
        if isinstance(entry, FellBack):
            version, epoch = entry.version, entry.epoch
            owners = {its: owner for its, owner in owners.items() if its <= epoch}
            continue
        if isinstance(entry, Claimed):
            if entry.epoch <= epoch:
                detail = f"claim of epoch {entry.epoch} after {epoch}"
                yield Violation(kind=Kind.EPOCH_BACK, subject=request_id, detail=detail)
        else:
            if entry.version != version + 1:
                detail = f"row {entry.version} was written after row {version}"
                yield Violation(kind=Kind.VERSION_BACK, subject=request_id, detail=detail)
            if entry.epoch < epoch:
                detail = f"row {entry.version} of epoch {entry.epoch} was written in epoch {epoch}"
                yield Violation(kind=Kind.EPOCH_BACK, subject=request_id, detail=detail)
            version = max(version, entry.version)
        epoch = max(epoch, entry.epoch)
        if entry.owner:
            owner = owners.setdefault(entry.epoch, entry.owner)
            if owner != entry.owner:
                detail = f"epoch {entry.epoch} was used by {owner} and by {entry.owner}"
                yield Violation(kind=Kind.TWO_OWNERS, subject=request_id, detail=detail)


# ---- what is left --------------------------------------------------------------------------------------------------


def _check_held(history: History) -> Iterator[Violation]:
    for name, after in history.held_after.items():
        before = history.held_before.get(name, 0)
        if after > before:
            yield Violation(kind=Kind.LEAKED, subject=name, detail=f"{before} before, {after} when all was over")
