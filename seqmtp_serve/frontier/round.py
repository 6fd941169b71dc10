"""The life of one request as a transition table. No IO, no clock, no payload: what a state permits, and nothing else.

    queued ─admit▶ prefilling ─bootstrap▶ committing ─commit▶ proposing ─verify▶ verifying ─select▶ committing …
                       └──────────resumed (a replay samples nothing)──────▶┘
    preempt: prefilling, proposing ─▶ queued.   lose: prefilling, proposing, verifying ─▶ lost ─replay▶ queued.
    fail: any but finished ─▶ committing (its last row says why).
    finish: committing ─▶ finished.             drop (cancelled, fenced, failed): any but finished ─▶ finished.

A target lost while a row is being committed does not lose the row: the commit ends first.
"""

from __future__ import annotations

from enum import StrEnum

from seqmtp_serve.errors import IllegalTransition


class State(StrEnum):
    """Where a request is."""

    QUEUED = "queued"  # waits for pages and a place in a batch
    PREFILLING = "prefilling"  # the target is building KV for P
    PROPOSING = "proposing"  # committed; drafts are on their way to the target
    VERIFYING = "verifying"  # a verify of this very version is in flight
    COMMITTING = "committing"  # tokens chosen, not yet in the record: nobody may see them
    FINISHED = "finished"
    LOST = "lost"  # the target's state is gone; the record is not


class Event(StrEnum):
    """What can happen to it."""

    ADMIT = "admit"
    CHUNK = "chunk"  # a prefill chunk that is not the last
    BOOTSTRAP = "bootstrap"  # the last chunk of a new request: its first token is chosen
    RESUMED = "resumed"  # the last chunk of a replay: nothing is chosen
    VERIFY = "verify"
    SELECT = "select"
    COMMIT = "commit"
    FINISH = "finish"  # the committed row was the last
    PREEMPT = "preempt"
    LOSE = "lose"
    REPLAY = "replay"
    FAIL = "fail"  # it cannot go on: the record is to say so
    DROP = "drop"


S, E = State, Event

TRANSITIONS: dict[tuple[State, Event], State] = {
    (S.QUEUED, E.ADMIT): S.PREFILLING,
    (S.PREFILLING, E.CHUNK): S.PREFILLING,
    (S.PREFILLING, E.BOOTSTRAP): S.COMMITTING,
    (S.PREFILLING, E.RESUMED): S.PROPOSING,
    (S.PROPOSING, E.VERIFY): S.VERIFYING,
    (S.VERIFYING, E.SELECT): S.COMMITTING,
    (S.COMMITTING, E.COMMIT): S.PROPOSING,
    (S.COMMITTING, E.FINISH): S.FINISHED,
    (S.PREFILLING, E.PREEMPT): S.QUEUED,
    (S.PROPOSING, E.PREEMPT): S.QUEUED,
    (S.PREFILLING, E.LOSE): S.LOST,
    (S.PROPOSING, E.LOSE): S.LOST,
    (S.VERIFYING, E.LOSE): S.LOST,
    (S.LOST, E.REPLAY): S.QUEUED,
    **{(state, E.FAIL): S.COMMITTING for state in State if state is not S.FINISHED},
    **{(state, E.DROP): S.FINISHED for state in State if state is not S.FINISHED},
}


def next_state(state: State, event: Event) -> State:
    """The state after `event`. Raises IllegalTransition, and then nothing has changed."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"{event} is not legal while {state}") from None
