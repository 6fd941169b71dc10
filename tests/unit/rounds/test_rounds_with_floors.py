"""Rounds whose chains end at a floor: what is committed, and kept in the ledger, which `--replay` makes again."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from test_driver import FAST, assert_exactly_once, driving, generate, make_request

from seqmtp_serve.fake import FakeTargetGroup
from seqmtp_serve.frontier.depth_choice import floors, replay
from seqmtp_serve.frontier.memory_store import MemoryFrontierStore
from seqmtp_serve.frontier.round_notes import RequestLedger, RoundNote
from seqmtp_serve.ports import RowResult, Snapshot, Verify
from seqmtp_serve.request import CommittedRow, FinishReason
from seqmtp_serve.speculation.draft_chances import num_worth
from services.console.timeline import _rows_that_differ
from services.gateway.request_ledger import ledger_of


class Judging(FakeTargetGroup):
    """Has a chance for each draft it makes, and leaves out those below the plan's floor."""

    def _verify(self, held: Any, item: Verify) -> RowResult:
        if not item.floor:
            return super()._verify(held, item)
        sure = 0.05 + 0.9 * (item.ref.version % 4) / 3
        chances = tuple(sure ** (place + 1) for place in range(item.depth))
        row = super()._verify(held, replace(item, depth=num_worth(chances, item.floor)))
        return replace(row, chances=chances)


class Boasting(Judging):
    """Says of more drafts than were asked for."""

    def _verify(self, held: Any, item: Verify) -> RowResult:
        row = super()._verify(held, item)
        return replace(row, chances=(*row.chances, 0.5, 0.5, 0.5, 0.5))


async def served(target: FakeTargetGroup) -> tuple[list[CommittedRow], tuple[RoundNote, ...], Any, Any]:
    request = make_request("a", max_tokens=100)
    async with driving(target, MemoryFrontierStore(), replace(FAST, depth_policy="auto")) as driver:
        rows = await generate(driver, request)
        assert_exactly_once(request, rows)
        return rows, driver.notes.of("a"), driver, request


@pytest.mark.covers(107)
async def test_the_plan_has_the_floors_of_the_decision_and_the_note_what_was_made_of_them() -> None:
    target = Judging()
    rows, notes, driver, _ = await served(target)
    by_version = {row.version: row for row in rows}
    judged = [note for note in notes if note.draft_chances]
    assert len(judged) > 10
    for note in judged:
        assert note.choice is not None
        assert note.floor == floors(note.choice, note.place)[0] > 0
        assert by_version[note.version].drafted == num_worth(note.draft_chances, note.floor)
    left_out = sum(len(note.draft_chances) - by_version[note.version].drafted for note in judged)
    assert driver.status().counters["drafts.left_out"] == left_out > 0
    assert replay(json.loads(json.dumps(list(driver.depth.ledger)))) == []
    verified = [item for plan in target.plans for item in plan.verify if item.next_depth]
    assert all(item.next_floor > 0 for item in verified if item.floor)


async def test_the_ledger_is_made_again_and_a_changed_one_is_told() -> None:
    rows, notes, _, request = await served(Judging())
    record = Snapshot(request=request, epoch=1, version=rows[-1].version, digest=bytes(16), rows=tuple(rows))
    text = ledger_of("chatcmpl-a", [RequestLedger(record=record, notes=notes)]).model_dump_json()
    assert list(_rows_that_differ(text)) == []
    entry = json.loads(text)
    rounds = entry["choices"][0]["rounds"]
    judged = next(row for row in rounds if row["draft_chances"] and row["drafts_from"] == "mtp")
    judged["floor"] = 2 * judged["floor"]
    assert list(_rows_that_differ(json.dumps(entry))) == [judged["decision"]]


async def test_a_fixed_depth_has_no_floor() -> None:
    target = Judging()
    request = make_request("a", max_tokens=40)
    async with driving(target, MemoryFrontierStore(), FAST) as driver:
        assert_exactly_once(request, await generate(driver, request))
    assert not any(item.floor or item.next_floor for plan in target.plans for item in plan.verify)
    assert not any(item.next_floor for plan in target.plans for item in plan.prefill)


async def test_chances_of_more_drafts_than_were_asked_for_are_no_round() -> None:
    request = make_request("a", max_tokens=40)
    async with driving(Boasting(), MemoryFrontierStore(), replace(FAST, depth_policy="auto")) as driver:
        rows = await generate(driver, request)
    assert (rows[-1].finish, rows[-1].stop_reason) == (FinishReason.ERROR, "protocol_error")
