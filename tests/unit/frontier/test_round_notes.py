"""Notes of rounds: bounded, in order, and here until they are kept elsewhere."""

from __future__ import annotations

from seqmtp_serve.frontier.depth_choice import DepthChoice, DepthInputs
from seqmtp_serve.frontier.round_notes import ENDED_REQUESTS, KEPT_NUMBERS, KEPT_ROUNDS, RoundNote, RoundNotes


def versions(notes: RoundNotes, request_id: str) -> list[int]:
    return [note.version for note in notes.of(request_id)]


def a_note(version: int, batch: int = 0) -> RoundNote:
    inputs = DepthInputs(survivals=((0.5, 0.25),) * batch, times=(None, None))
    return RoundNote(version=version, depth=2, choice=DepthChoice(depths=(2,) * batch, reason="", inputs=inputs))


def test_the_last_rounds_of_a_request_stay() -> None:
    notes = RoundNotes()
    for version in range(1, KEPT_ROUNDS + 11):
        notes.add("r", a_note(version))
        notes.add("other", a_note(version)) if version < 3 else None
    assert versions(notes, "r") == list(range(11, KEPT_ROUNDS + 11))
    assert versions(notes, "other") == [1, 2]
    assert versions(notes, "unknown") == []


def test_large_batches_leave_room_for_fewer() -> None:
    notes, batch = RoundNotes(), 1024
    for version in range(1, 101):
        notes.add("r", a_note(version, batch))
    assert versions(notes, "r") == list(range(101 - KEPT_NUMBERS // (8 * batch), 101))
    notes.add("r", a_note(101, KEPT_NUMBERS))
    assert versions(notes, "r") == [101]  # one is always there
    notes.add("r", a_note(102))
    assert versions(notes, "r") == [102]


def test_what_ended_stays_until_it_is_kept() -> None:
    notes = RoundNotes()
    notes.add("r", a_note(1))
    assert notes.oldest_ended() is None
    notes.end("r")
    notes.end("never here")
    first = notes.oldest_ended()
    assert first is not None
    assert versions(notes, "r") == [1]
    notes.add("r", a_note(2))  # it came back, and ends again while the first notes are being written
    notes.end("r")
    notes.kept(*first)
    assert versions(notes, "r") == [1, 2]
    again = notes.oldest_ended()
    assert again is not None
    notes.kept(*again)
    assert notes.oldest_ended() is None
    assert versions(notes, "r") == []


def test_where_nobody_keeps_them_the_oldest_go() -> None:
    notes = RoundNotes()
    for number in range(ENDED_REQUESTS + 5):
        notes.add(f"r{number}", a_note(1))
        notes.end(f"r{number}")
    assert versions(notes, "r4") == []
    assert versions(notes, "r5") == [1]
