"""GET /v1/requests/{id}/ledger: every choice's rounds, the reasons that are known, and typed refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import SecretStr

from seqmtp_serve.frontier.depth_choice import DepthChoice, DepthInputs, decide, replay
from seqmtp_serve.frontier.round_notes import KEPT_ROUNDS, RequestLedger, RoundNote
from seqmtp_serve.frontier.step_times import StepTime
from seqmtp_serve.ports import Snapshot
from seqmtp_serve.request import CommittedRow, Request, SamplingParams
from services.console.timeline import decisions_of, rows_of
from services.gateway.request_ledger import ledger_of
from services.settings import GatewaySettings, Settings
from tests.services.gateway.world import CHAT, MESSAGES, fake, http, ids

WEIGHED = decide(
    DepthInputs(
        survivals=((0.9, 0.8, 0.7), (0.5, 0.2, 0.1)),
        times=tuple(StepTime(full_ms=10.0 + depth, draft_ms=0.3) for depth in range(4)),
    )
)
TIMINGS = {"step": 12.5, "forward": 9.0}
NOTES = [
    RoundNote(version=1, depth=0, timings_ms=TIMINGS),
    RoundNote(version=2, depth=3, reason=WEIGHED.reason, place=0, choice=WEIGHED, timings_ms=TIMINGS),
    RoundNote(version=3, depth=3, reason="static", choice=DepthChoice(depths=(3,), reason="static")),
]


async def ledger_after(body: dict[str, Any], notes: list[RoundNote]) -> dict[str, Any]:
    coordinator = fake([ids("h"), ids("ello"), ids("two"), ids("rld")])
    coordinator.notes = notes
    async with http(coordinator) as client:
        answer = (await client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 11, **body})).json()
        found = await client.get(f"/v1/requests/{answer['id']}/ledger")
    assert found.status_code == 200
    ledger: dict[str, Any] = found.json()
    assert ledger["id"] == answer["id"]
    return ledger


async def test_rounds_are_the_records_and_reasons_are_of_those_that_are_known() -> None:
    ledger = await ledger_after({}, NOTES)
    assert (ledger["object"], ledger["kept_rounds"]) == ("request.ledger", KEPT_ROUNDS)
    (choice,) = ledger["choices"]
    bootstrap, second, third, last = choice["rounds"]
    assert bootstrap["tokens_from"] == {"bootstrap": 1}
    assert (bootstrap["depth"], bootstrap["reason"], bootstrap["timings_ms"]) == (None, None, TIMINGS)
    assert (second["drafts_from"], second["drafted"], second["accepted"], second["committed"]) == ("mtp", 3, 3, 4)
    assert second["tokens_from"] == {"mtp": 3, "target": 1}
    assert (second["depth"], second["reason"], second["decision"], second["place"]) == (3, WEIGHED.reason, 0, 0)
    assert (third["depth"], third["reason"], third["decision"]) == (3, "static", None)
    assert third["tokens_from"] == {"mtp": 2, "correction": 1}
    assert [last[name] for name in ("depth", "reason", "timings_ms")] == [None] * 3
    totals = choice["totals"]
    assert (totals["rounds"], totals["committed"]) == (3, 11)
    assert totals["expected_r"] == 1 + totals["accepted"] / 3
    assert len(choice["decisions"]) == 1
    assert replay(choice["decisions"]) == []


async def test_each_choice_has_a_ledger() -> None:
    ledger = await ledger_after({"n": 2}, [])
    assert [choice["index"] for choice in ledger["choices"]] == [0, 1]


def test_copies_are_a_source_of_their_own_and_count_as_the_proposers() -> None:
    bootstrap = CommittedRow(request_id="r", version=1, tokens=(1,), origins="b")
    copied = CommittedRow(
        request_id="r", version=2, tokens=(1, 2, 3), drafted=3, accepted=2, origins="llc", copied=True
    )
    module = CommittedRow(request_id="r", version=3, tokens=(4,), drafted=1, origins="c")
    request = Request(request_id="r", prompt_ids=(7,), params=SamplingParams())
    rows = (bootstrap, copied, module)
    record = Snapshot(request=request, epoch=1, version=3, digest=bytes(16), rows=rows)
    ledger = RequestLedger(record=record, notes=())
    (choice,) = ledger_of("chatcmpl-r", [ledger]).choices
    assert [each.drafts_from for each in choice.rounds] == [None, "copy", "mtp"]
    assert choice.rounds[1].tokens_from == {"copy": 2, "correction": 1}
    assert choice.totals.expected_r == 1 + 2 / 2


async def test_a_prediction_is_a_source_of_its_own() -> None:
    coordinator = fake(predicted=True)
    async with http(coordinator) as client:
        prediction = {"type": "content", "content": "hello"}
        answer = (await client.post(CHAT, json={"messages": MESSAGES, "prediction": prediction})).json()
        (choice,) = (await client.get(f"/v1/requests/{answer['id']}/ledger")).json()["choices"]
    assert {entry["drafts_from"] for entry in choice["rounds"][1:]} == {"prediction"}
    assert choice["totals"]["expected_r"] is None  # that is the MTP module's


async def test_an_unknown_answer_is_a_404_that_names_the_id() -> None:
    async with http() as client:
        answer = await client.get("/v1/requests/chatcmpl-never/ledger")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "request_not_found"
    assert answer.json()["error"]["param"] == "id"


async def test_it_asks_for_the_key() -> None:
    settings = Settings(gateway=GatewaySettings(api_key=SecretStr("k")))
    async with http(settings=settings) as client:
        assert (await client.get("/v1/requests/chatcmpl-never/ledger")).status_code == 401
        headers = {"Authorization": "Bearer k"}
        assert (await client.get("/v1/requests/chatcmpl-never/ledger", headers=headers)).status_code == 404


async def test_the_timeline_reads_it() -> None:
    text = json.dumps(await ledger_after({}, NOTES))
    assert [row["version"] for row in rows_of(text) if row["timings_ms"]] == [1, 2]
    assert replay(list(decisions_of(text))) == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"choices": []}'])
def test_what_is_no_ledger_has_no_decisions(text: str) -> None:
    assert list(decisions_of(text)) == []
