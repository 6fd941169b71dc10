"""A request's ledger at any coordinator: while it runs, after its end, and after its owner died."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from seqmtp_serve.errors import RequestNotFound
from seqmtp_serve.frontier.depth_choice import replay
from seqmtp_serve.frontier.round_notes import KEPT_ROUNDS, RequestLedger
from seqmtp_serve.request import CommittedRow
from services.coordinator.leases import hand_back
from services.gateway.request_ledger import ledger_of
from services.rpc import status
from services.rpc.convert import from_wire
from services.rpc.wire import coordinator as messages
from services.store.embedded import EmbeddedValkey
from tests.services.coordinators import CONFIG, Node, a_request, nodes

AUTO = replace(CONFIG, depth_policy="auto")


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    folder: Path = tmp_path_factory.mktemp("valkey")
    with EmbeddedValkey(folder) as running:
        yield running


async def ledger_at(node: Node, request_id: str) -> RequestLedger:
    async with node.stub() as stub:
        try:
            return from_wire(RequestLedger, await stub.Ledger(messages.LookupRequest(request_id=request_id)))
        except grpc.aio.AioRpcError as failure:
            raise status.from_call(failure) from failure


def as_json(ledger: RequestLedger) -> dict[str, Any]:
    """The only choice, as a client reads it."""
    (choice,) = json.loads(ledger_of("r", [ledger]).model_dump_json())["choices"]
    found: dict[str, Any] = choice
    return found


def assert_explained(choice: dict[str, Any], rows: list[CommittedRow]) -> None:
    """Each round is as its row says, and its depth is the one that its decision gives, made again here."""
    versions = [row.version for row in rows if row.tokens]
    if choice["status"] == "in_progress":
        versions = versions[: len(choice["rounds"])]
    assert [entry["version"] for entry in choice["rounds"]] == versions
    assert replay(choice["decisions"]) == []
    for entry, row in zip(choice["rounds"], rows, strict=False):
        assert (entry["drafted"], entry["accepted"], entry["committed"]) == (row.drafted, row.accepted, len(row.tokens))
        if entry["decision"] is not None:
            decision = choice["decisions"][entry["decision"]]
            assert entry["reason"] == decision["reason"] == (row.depth_reason or decision["reason"])
            assert row.drafted <= entry["depth"] <= decision["depths"][entry["place"]]
            assert entry["timings_ms"]["step"] >= 0


@pytest.mark.covers(104, 107)
async def test_it_is_the_same_at_every_coordinator_running_and_after(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a", "b", config=AUTO, delay_s=0.01) as (a, b):
        others = [a_request(f"o{number}") for number in range(2)]
        reading = [asyncio.ensure_future(_read(a, other)) for other in others]
        await a.begin(a_request("r"))
        async with aclosing(a.attach("r")) as rows:
            seen = [await anext(rows) for _ in range(12)]
            running = [as_json(await ledger_at(node, "r")) for node in (a, b)]
            seen += [row async for row in rows]
        await asyncio.gather(*reading)
        while a.driver.notes.oldest_ended() is not None:
            await asyncio.sleep(0.02)
        ended = [as_json(await ledger_at(node, "r")) for node in (a, b)]
    for choice in (*running, *ended):
        assert_explained(choice, seen)
    assert all(choice["status"] == "in_progress" and len(choice["rounds"]) >= 12 for choice in running)
    assert all(sum(entry["reason"] is not None for entry in choice["rounds"]) >= 11 for choice in running)
    assert ended[0] == ended[1]
    assert ended[0]["status"] == "completed"
    assert max(len(entry["depths"]) for entry in ended[0]["decisions"]) == 3  # the neighbours are in the inputs
    totals = ended[0]["totals"]
    assert totals["committed"] == 300 == sum(totals["tokens_from"].values())
    drafted = [row for row in seen if row.drafted]
    assert totals["expected_r"] == 1 + sum(row.accepted for row in drafted) / len(drafted)
    wrong = json.loads(json.dumps(ended[0]["decisions"]))
    wrong[3]["depths"][0] += 1
    assert replay(wrong) == [3]


async def _read(node: Node, request: Any) -> None:
    async for _ in node.generate(request):
        pass


async def test_a_handed_over_request_keeps_the_notes_of_both_owners(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a", "b", config=AUTO, delay_s=0.01) as (a, b):
        await a.begin(a_request("r"))
        async with aclosing(a.attach("r")) as rows:
            first = [await anext(rows) for _ in range(9)]
        owned = a.driver.owned()
        await a.driver.close()
        await hand_back(owned, a.store)
        await a.ledger.keep_last()
        rest = [row async for row in b.attach("r", first[-1].version)]
        await b.ledger.keep_last()
        await a.forgotten()
        choice = as_json(await ledger_at(b, "r"))
    assert_explained(choice, first + rest)
    assert choice["epoch"] == 2
    without = [entry["version"] for entry in choice["rounds"] if entry["timings_ms"] is None]
    assert len(without) <= 1  # the one whose commit had no answer yet when its owner ended
    assert all(version > first[-1].version for version in without)


async def test_what_a_dead_owner_knew_is_null_and_the_rounds_are_there(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a", "b", config=AUTO, delay_s=0.01) as (a, b):
        await a.begin(a_request("r"))
        async with aclosing(a.attach("r")) as rows:
            first = [await anext(rows) for _ in range(9)]
        await a.kill()
        await a.forgotten()
        rest = [row async for row in b.attach("r", first[-1].version)]
        await b.ledger.keep_last()
        choice = as_json(await ledger_at(b, "r"))
    assert_explained(choice, first + rest)
    assert all(entry["reason"] is None and entry["timings_ms"] is None for entry in choice["rounds"][:9])
    assert choice["rounds"][-1]["reason"]


async def test_a_long_answer_keeps_its_last_rounds(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a", delay_s=0.0) as (a,):
        rows = [row async for row in a.generate(a_request("r", max_tokens=KEPT_ROUNDS + 60, max_depth=0))]
        choice = as_json(await ledger_at(a, "r"))
    assert len(choice["rounds"]) == len(rows) == KEPT_ROUNDS + 60
    kept = [entry["version"] for entry in choice["rounds"] if entry["reason"] is not None]
    assert kept == list(range(61, KEPT_ROUNDS + 61))
    assert choice["decisions"] == []  # nothing was weighed
    assert choice["totals"]["expected_r"] is None


async def test_nobody_knows_an_unknown_one(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a") as (a,):
        with pytest.raises(RequestNotFound):
            await ledger_at(a, "never")


async def test_notes_live_as_long_as_their_record(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a") as (a,):
        await _read(a, a_request("r", max_tokens=9))
        await a.ledger.keep_last()
        left_ms = await a.store.redis.pttl("seqmtp:{r}:notes")
        assert 590_000 < left_ms <= 600_000
