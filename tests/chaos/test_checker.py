"""The checker finds each kind of violation when it is planted in a sound history, and nothing in a sound one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.chaos.checker import Kind, check
from tests.chaos.history import (
    Broken,
    Claimed,
    ClientEvent,
    Committed,
    Ended,
    FellBack,
    History,
    Invoked,
    Left,
    Received,
)

REFERENCE = (5, 9, 9, 2, 7, 1, 4, 9)
ROWS = ((5,), (9, 9, 2), (7, 1), (4, 9))


def sound() -> History:
    """One request, claimed twice; its stream broke once and went on."""
    store: list[Claimed | Committed] = [Claimed(request_id="r", epoch=1, owner="a")]
    clients: list[ClientEvent] = [
        Invoked(stream="s", request_id="r", at=0.0, reference=REFERENCE, text="a word", finish="length")
    ]
    for version, tokens in enumerate(ROWS, 1):
        epoch, owner = (1, "a") if version <= 2 else (2, "b")
        if version == 3:
            store.append(Claimed(request_id="r", epoch=2, owner="b"))
            clients.append(Broken(stream="s", at=2.5, reason="connection lost"))
        store.append(Committed(request_id="r", epoch=epoch, version=version, tokens=tokens, owner=owner))
        clients.append(Received(stream="s", version=version, tokens=tokens, at=float(version), log_len=len(store)))
    clients.append(Ended(stream="s", at=5.0, finish="length", text="a word"))
    held = {"target pages": 0, "store keys": 3}
    return History(clients=tuple(clients), store=tuple(store), held_before=held, held_after=dict(held))


def received(history: History) -> list[int]:
    return [place for place, event in enumerate(history.clients) if isinstance(event, Received)]


def without(events: tuple, place: int) -> tuple:
    return (*events[:place], *events[place + 1 :])


def with_clients(change: Callable[[list[ClientEvent], list[int]], None]) -> History:
    history = sound()
    events = list(history.clients)
    change(events, received(history))
    return replace(history, clients=tuple(events))


def with_store(change: Callable[[list], None]) -> History:
    history = sound()
    entries = list(history.store)
    change(entries)
    return replace(history, store=tuple(entries))


def lost_row() -> History:
    return with_clients(lambda events, rows: events.pop(rows[1]))


def repeated_row() -> History:
    return with_clients(lambda events, rows: events.insert(rows[1], events[rows[1]]))


def reordered_rows() -> History:
    def swap(events: list, rows: list[int]) -> None:
        events[rows[2]], events[rows[3]] = events[rows[3]], events[rows[2]]

    return with_clients(swap)


def spoiled_everywhere(version: int, tokens: tuple[int, ...]) -> History:
    """The record and the client agree on other tokens: only the reference can tell."""
    history = sound()

    def spoil(event):
        hit = isinstance(event, Received | Committed) and event.version == version
        return replace(event, tokens=tokens) if hit else event

    return replace(history, clients=tuple(map(spoil, history.clients)), store=tuple(map(spoil, history.store)))


def early_row() -> History:
    return with_clients(lambda events, rows: events.__setitem__(rows[2], replace(events[rows[2]], log_len=3)))


def uncommitted_row() -> History:
    def forget(entries: list) -> None:
        entries.pop(2)
        entries.insert(2, Claimed(request_id="other", epoch=1, owner="a"))

    return with_store(forget)


def written_twice() -> History:
    return with_store(lambda entries: entries.insert(3, entries[2]))


def fenced_commit() -> History:
    return with_store(lambda entries: entries.__setitem__(4, replace(entries[4], epoch=1, owner="a")))


def claim_of_an_old_epoch() -> History:
    return with_store(lambda entries: entries.append(Claimed(request_id="r", epoch=2, owner="b")))


def two_owners() -> History:
    return with_store(lambda entries: entries.__setitem__(5, replace(entries[5], owner="a")))


def no_end() -> History:
    return with_clients(lambda events, rows: events.pop())


def error_at_the_end() -> History:
    ended = Ended(stream="s", at=5.0, finish=None, detail="store_unreachable")
    return with_clients(lambda events, rows: events.__setitem__(-1, ended))


def ended_with(**what: str) -> History:
    return with_clients(lambda events, rows: events.__setitem__(-1, replace(events[-1], **what)))


def end_too_early() -> History:
    return with_clients(lambda events, rows: events.pop(rows[3]))


def leaked_page() -> History:
    return replace(sound(), held_after={"target pages": 1, "store keys": 3})


def failed_over(kept: int, *, promised: bool) -> History:
    """After row 2 was shown another store takes over, with the first `kept` rows; its owner commits the rest again."""
    history = sound()
    place = next(place for place, entry in enumerate(history.store) if entry.epoch == 2)
    fell = FellBack(request_id="r", epoch=1, version=kept, promised=promised)
    claim = replace(history.store[place], epoch=2)
    again = [replace(entry, epoch=2, owner="b") for entry in history.store[kept + 1 : place]]
    store = (*history.store[:place], fell, claim, *again, *history.store[place + 1 :])
    shift = len(store) - len(history.store)
    clients = tuple(
        replace(event, log_len=event.log_len + shift) if isinstance(event, Received) and event.version > 2 else event
        for event in history.clients
    )
    return replace(history, store=store, clients=clients)


PLANTED = {
    "lost row": (lost_row, Kind.LOST),
    "lost token": (lambda: spoiled_everywhere(2, (9, 2)), Kind.LOST),
    "repeated row": (repeated_row, Kind.REPEATED),
    "repeated token": (lambda: spoiled_everywhere(3, (7, 7, 1)), Kind.REPEATED),
    "reordered rows": (reordered_rows, Kind.REORDERED),
    "altered token": (lambda: spoiled_everywhere(3, (7, 3)), Kind.ALTERED),
    "altered text": (lambda: ended_with(text="a wor"), Kind.ALTERED),
    "another end": (lambda: ended_with(finish="stop"), Kind.ALTERED),
    "token after the end": (lambda: spoiled_everywhere(4, (4, 9, 6)), Kind.ALTERED),
    "shown early": (early_row, Kind.UNCOMMITTED),
    "shown and never committed": (uncommitted_row, Kind.UNCOMMITTED),
    "written twice": (written_twice, Kind.VERSION_BACK),
    "written by a fenced owner": (fenced_commit, Kind.EPOCH_BACK),
    "epoch claimed again": (claim_of_an_old_epoch, Kind.EPOCH_BACK),
    "two owners": (two_owners, Kind.TWO_OWNERS),
    "no end": (no_end, Kind.INCOMPLETE),
    "an error": (error_at_the_end, Kind.INCOMPLETE),
    "a short end": (end_too_early, Kind.INCOMPLETE),
    "a row that the new store lacks": (lambda: failed_over(1, promised=True), Kind.FORGOTTEN),
    "a page": (leaked_page, Kind.LEAKED),
}


@pytest.mark.covers(152)
def test_a_sound_history_has_no_violation() -> None:
    assert check(sound()) == ()


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_violation_is_found(planted: str) -> None:
    plant, kind = PLANTED[planted]
    found = check(plant())
    assert kind in {violation.kind for violation in found}, found
    assert all(str(violation) for violation in found)


def test_a_store_that_takes_over_may_lack_rows_where_nothing_was_promised() -> None:
    assert check(failed_over(1, promised=False)) == ()
    assert check(failed_over(2, promised=True)) == ()  # it has them all
    late = failed_over(0, promised=False)
    lacking = tuple(entry for place, entry in enumerate(late.store) if place != 5)  # row 1 is not committed again
    assert Kind.VERSION_BACK in {violation.kind for violation in check(replace(late, store=lacking))}


def test_a_client_that_left_is_owed_no_end_but_what_it_got_must_be_right() -> None:
    history = sound()
    left = (*history.clients[:4], Left(stream="s", at=3.0))
    assert check(replace(history, clients=left)) == ()
    spoiled = (*without(history.clients[:4], 1), Left(stream="s", at=3.0))
    assert {violation.kind for violation in check(replace(history, clients=spoiled))} == {Kind.LOST}


def test_streams_and_requests_are_judged_apart() -> None:
    first, second = sound(), sound()
    renamed = tuple(replace(event, stream="t") for event in second.clients)
    both = replace(first, clients=tuple(x for pair in zip(first.clients, renamed, strict=True) for x in pair))
    assert check(both) == ()
    assert {violation.subject for violation in check(replace(both, clients=without(both.clients, 5)))} == {"t"}
