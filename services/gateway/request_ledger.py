"""A request's ledger as JSON: each round's depth and why, what it drafted and committed, who proposed the tokens. Pure.

Rounds come from the record, so they are the same at any gateway for as long as there is one. Depth, reason, decision
and times are of the last rounds only, and are null for older ones and for those of a coordinator that died.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from seqmtp_serve.frontier.round_notes import KEPT_ROUNDS, RequestLedger, RoundNote
from seqmtp_serve.request import CommittedRow
from services.gateway.answer import status_of

# A letter of `CommittedRow.origins`, and who proposed the token.
SOURCES = {
    "b": "bootstrap",
    "a": "mtp",
    "l": "copy",
    "p": "prediction",
    "f": "forced",
    "c": "correction",
    "n": "target",
}


class Round(BaseModel):
    """One committed row; row 1 is the bootstrap. `drafts_from` as `_drafts_from` says."""

    version: int
    drafts_from: str | None
    drafted: int
    accepted: int
    committed: int  # tokens
    origins: str  # one letter a token, as in a trace
    tokens_from: dict[str, int]  # the words of `SOURCES`; a draft that did not stand is in none
    depth: int | None  # drafts asked for
    reason: str | None
    copy_survivals: list[float] | None  # were to be drafted: how often the first, the first two, … were thought right
    draft_chances: list[float] | None  # of the module's drafts that were made: how likely all up to it are accepted
    floor: float | None  # they were left out from the first whose chance is below
    decision: int | None  # in `decisions`; null where nothing was weighed
    place: int | None  # of this request in the decision's lists
    timings_ms: dict[str, float] | None


class Decision(BaseModel):
    """How deep the requests of one step were to draft. `seqmtp timeline --replay` makes it again from `inputs`."""

    inputs: dict[str, Any]
    depths: list[int]
    row_price: float  # tokens that the time of one more row would otherwise bring: what a copied draft has to beat
    pass_price: float  # and that of a request's part in one more pass of the module
    reason: str


class LedgerTotals(BaseModel):
    """Of all rounds. `expected_r` = 1 + accepted / rounds that had drafts of the proposer; null without any."""

    rounds: int
    drafted: int
    accepted: int
    committed: int
    expected_r: float | None
    tokens_from: dict[str, int]


class ChoiceLedger(BaseModel):
    """One choice of the answer."""

    index: int
    status: str
    coordinator: str  # who owns the request, or did
    epoch: int  # rises with each owner
    totals: LedgerTotals
    rounds: list[Round]
    decisions: list[Decision]


class Ledger(BaseModel):
    """What each round of an answer cost and earned, and why it was as deep as it was."""

    id: str
    object: str = "request.ledger"
    kept_rounds: int = KEPT_ROUNDS  # depth, reason, decision and times are kept of so many rounds at most: the last
    choices: list[ChoiceLedger]


def ledger_of(id: str, choices: Sequence[RequestLedger]) -> Ledger:
    """The answer's ledger as it is now."""
    return Ledger(id=id, choices=[_choice(index, each) for index, each in enumerate(choices)])


def _choice(index: int, ledger: RequestLedger) -> ChoiceLedger:
    record = ledger.record
    notes = {note.version: note for note in ledger.notes}
    weighed = {
        note.version: note.choice for note in ledger.notes if note.choice is not None and note.choice.inputs is not None
    }
    places = {version: place for place, version in enumerate(weighed)}
    rows = [row for row in record.rows if row.tokens]
    return ChoiceLedger(
        index=index,
        status=status_of([record]),
        coordinator=record.owner,
        epoch=record.epoch,
        totals=_totals(rows),
        rounds=[_round(row, notes.get(row.version), places.get(row.version)) for row in rows],
        decisions=[Decision(**choice.to_json()) for choice in weighed.values()],
    )


def _round(row: CommittedRow, note: RoundNote | None, decision: int | None) -> Round:
    decided = note is not None and bool(note.reason)
    return Round(
        version=row.version,
        drafts_from=_drafts_from(row),
        drafted=row.drafted,
        accepted=row.accepted,
        committed=len(row.tokens),
        origins=row.origins,
        tokens_from=_sources(row.origins),
        depth=note.depth if note is not None and decided else None,
        reason=note.reason if note is not None and decided else None,
        copy_survivals=list(note.copy_survivals) if note is not None and note.copy_survivals else None,
        draft_chances=list(note.draft_chances) if note is not None and note.draft_chances else None,
        floor=note.floor if note is not None and note.draft_chances else None,
        decision=decision,
        place=note.place if note is not None and decision is not None else None,
        timings_ms=None if note is None else dict(note.timings_ms),
    )


def _totals(rows: Sequence[CommittedRow]) -> LedgerTotals:
    proposed = [row for row in rows if _drafts_from(row) in ("mtp", "copy")]
    return LedgerTotals(
        rounds=sum(row.origins != "b" for row in rows),
        drafted=sum(row.drafted for row in rows),
        accepted=sum(row.accepted for row in rows),
        committed=sum(len(row.tokens) for row in rows),
        expected_r=1 + sum(row.accepted for row in proposed) / len(proposed) if proposed else None,
        tokens_from=_sources("".join(row.origins for row in rows)),
    )


def _drafts_from(row: CommittedRow) -> str | None:
    """Who proposed its drafts: mtp, copy, prediction, forced (the first; a proposer's may follow), or nobody."""
    if not row.drafted:
        return None
    return "prediction" if row.predicted else "forced" if row.forced else "copy" if row.copied else "mtp"


def _sources(origins: str) -> dict[str, int]:
    return {SOURCES[letter]: number for letter, number in Counter(origins).items()}
