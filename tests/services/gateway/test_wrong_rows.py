"""Coordinators whose rows are mixed up on the way: none of it is shown, all is counted, and the text is whole.

Real coordinators on one store, over gRPC. The first of them is the one that is asked first; its rows are tampered with
behind everything that makes them right.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from seqmtp_serve.errors import AncestryMismatch
from seqmtp_serve.fake import fake_text
from seqmtp_serve.request import CommittedRow, FinishReason, Request
from services.gateway.app import create_app
from services.gateway.directory import FixedDirectory
from services.gateway.grpc_coordinators import GrpcCoordinators
from services.gateway.measure import Measures
from services.settings import Settings
from services.store.embedded import EmbeddedValkey
from tests.services.coordinators import Node, a_request, nodes
from tests.services.gateway.world import CHAT, MESSAGES, TEXT, events

Rows = list[CommittedRow]
Tamper = Callable[[Rows], Rows]
REQUEST = a_request("r", max_tokens=40)


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(tmp_path_factory.mktemp("valkey")) as running:
        yield running


def altered(rows: Rows) -> Rows:
    """Another token in the third row."""
    first, *others = rows[2].tokens
    return [*rows[:2], replace(rows[2], tokens=(first ^ 1, *others)), *rows[3:]]


WRONG: dict[str, tuple[Tamper, str]] = {
    "altered": (altered, "ancestry_mismatch"),
    "altered in the first row": (
        lambda rows: [replace(rows[0], tokens=(rows[0].tokens[0] ^ 1,)), *rows[1:]],
        "ancestry_mismatch",
    ),
    "swapped": (lambda rows: [*rows[:2], rows[3], rows[2], *rows[4:]], "stale_version"),
    "swapped under each other's version": (
        lambda rows: [*rows[:2], replace(rows[3], version=3), replace(rows[2], version=4), *rows[4:]],
        "ancestry_mismatch",
    ),
    "replayed": (lambda rows: [*rows[:3], rows[2], *rows[3:]], "stale_version"),
    "replayed as the next": (lambda rows: [*rows[:3], replace(rows[2], version=4), *rows[4:]], "ancestry_mismatch"),
    "reordered": (lambda rows: [rows[0], *reversed(rows[1:])], "stale_version"),
    "left out": (lambda rows: [*rows[:2], *rows[3:]], "stale_version"),
    "forged": (
        lambda rows: [*rows[:3], replace(rows[3], tokens=(7, 7), digest=b"sixteen bytes, ok"[:16]), *rows[4:]],
        "ancestry_mismatch",
    ),
    "forged, without its place": (
        lambda rows: [*rows[:2], replace(rows[2], epoch=0, digest=b""), *rows[3:]],
        "fenced",
    ),
    "of an old epoch": (
        lambda rows: [*(replace(row, epoch=5) for row in rows[:3]), *rows[3:]],
        "fenced",
    ),
    "of another request": (
        lambda rows: [*rows[:2], replace(rows[2], request_id="another"), *rows[3:]],
        "protocol_error",
    ),
}


def mix_up(node: Node, tamper: Tamper, *, times: int = 10**6) -> list[str]:
    """From now on whoever reads at the node gets its rows tampered with, so many times; the ids it was asked for."""
    asked: list[str] = []
    right = node.reader.rows

    async def rows(request_id: str, after_version: int) -> AsyncGenerator[CommittedRow, None]:
        asked.append(request_id)
        async with contextlib.aclosing(right(request_id, after_version)) as found:
            given = [row async for row in found]
        for row in tamper(given) if len(asked) <= times else given:
            yield row

    node.reader.rows = rows  # type: ignore[method-assign]
    return asked


@contextlib.asynccontextmanager
async def gateway(
    *asked: Node, failover_s: float = 20.0, shared: bool = True
) -> AsyncIterator[tuple[GrpcCoordinators, Counter[str]]]:
    """A gateway's view of these coordinators, and the codes of what it refused."""
    refused: Counter[str] = Counter()

    def count(code: str) -> None:
        refused[code] += 1

    directory = FixedDirectory([node.address for node in asked])
    client = GrpcCoordinators(directory, failover_s=failover_s, wrong_row=count, shared=shared)
    try:
        yield client, refused
    finally:
        await client.close()


def assert_whole(request: Request, rows: Rows) -> None:
    assert tuple(token for row in rows for token in row.tokens) == fake_text(request)
    assert [row.version for row in rows] == list(range(1, len(rows) + 1))
    assert rows[-1].finish is FinishReason.LENGTH


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "plain"])
@pytest.mark.parametrize("what", WRONG)
async def test_a_wrong_row_is_refused_and_the_stream_goes_on_elsewhere(
    valkey: EmbeddedValkey, what: str, shared: bool
) -> None:
    tamper, code = WRONG[what]
    async with nodes(valkey, "a", "b") as (a, b), gateway(a, b, shared=shared) as (client, refused):
        asked, elsewhere = mix_up(a, tamper), mix_up(b, lambda rows: rows)
        assert_whole(REQUEST, [row async for row in client.generate(REQUEST, {})])
        assert refused == {code: 1}
        assert (asked, elsewhere) == (["r"], ["r"])


async def test_a_row_that_was_mixed_up_once_is_read_again_where_it_came_from(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a") as (a,), gateway(a) as (client, refused):
        asked = mix_up(a, altered, times=2)
        assert_whole(REQUEST, [row async for row in client.generate(REQUEST, {})])
        assert (refused, asked) == ({"ancestry_mismatch": 2}, ["r"] * 3)


async def test_when_nobody_has_the_right_row_the_stream_says_so(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a", "b") as (a, b), gateway(a, b, failover_s=0.5) as (client, refused):
        mix_up(a, altered)
        mix_up(b, altered)
        given: Rows = []
        with pytest.raises(AncestryMismatch, match="row 3 does not follow"):
            async for row in client.generate(REQUEST, {}):
                given.append(row)
        assert [row.version for row in given] == [1, 2]
        assert refused["ancestry_mismatch"] >= 2


async def test_a_wrong_record_is_looked_up_elsewhere(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a", "b") as (a, b), gateway(a, b, failover_s=0.5) as (client, refused):
        rows = [row async for row in client.generate(REQUEST, {})]

        def mix_up_records(node: Node) -> None:
            right = node.reader.find

            async def find(request_id: str) -> Any:
                record = await right(request_id)
                return replace(record, rows=tuple(altered(list(record.rows))))

            node.reader.find = find  # type: ignore[method-assign]

        mix_up_records(a)
        for _ in range(2):  # whose turn it is
            assert list((await client.lookup("r")).rows) == rows
            assert list((await client.ledger("r")).record.rows) == rows
        assert refused["ancestry_mismatch"] >= 2
        mix_up_records(b)
        with pytest.raises(AncestryMismatch):
            await client.lookup("r")


@contextlib.asynccontextmanager
async def http_gateway(*asked: Node) -> AsyncIterator[httpx.AsyncClient]:
    """The whole application over these coordinators."""
    measures = Measures(CollectorRegistry())
    client = GrpcCoordinators(FixedDirectory([node.address for node in asked]), wrong_row=measures.wrong_row)
    app = create_app(Settings(), client, TEXT, measures=measures)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://g", timeout=30) as http,
    ):
        yield http


def text_of(body: str, index: int = 0) -> str:
    """What a choice's chunks say."""
    chunks = [data["choices"] for _, data in events(body) if data != "[DONE]"]
    return "".join(part["delta"].get("content") or "" for parts in chunks for part in parts if part["index"] == index)


async def refused_by(http: httpx.AsyncClient) -> float:
    """By `/metrics`."""
    lines = (await http.get("/metrics")).text.splitlines()
    found = [
        line for line in lines if line.startswith("seqmtp_rows_refused_total") and 'code="ancestry_mismatch"' in line
    ]
    return float(found[0].rpartition(" ")[2])


ASKED = {"temperature": 0, "max_tokens": 30, "ignore_eos": True, "stream": True}


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_clients_see_nothing_of_it_from_any_event_on(valkey: EmbeddedValkey, num_choices: int) -> None:
    async with nodes(valkey, "a", "b") as (a, b), http_gateway(a, b) as http, http_gateway(b) as sound:
        assert await refused_by(http) == 0
        mix_up(a, altered)
        body = {"messages": MESSAGES, "n": num_choices, **ASKED}
        told = (await http.post(CHAT, json=body, headers={"Idempotency-Key": "key"})).text
        assert await refused_by(http) >= 1
        url = f"{CHAT}/{events(told)[0][1]['id']}"
        right = (await sound.get(url, params={"stream": True})).text
        assert await refused_by(sound) == 0
        for index in range(num_choices):
            assert text_of(told, index) == text_of(right, index)
            assert len(text_of(right, index)) > 0
        blocks = right.split("\n\n")[:-1]
        for place in (0, len(blocks) // 2, len(blocks) - 2):
            event_id = blocks[place].split("\n")[0].removeprefix("id: ")
            rest = (await http.get(url, headers={"Last-Event-ID": event_id})).text
            before = "\n\n".join(blocks[: place + 1])
            for index in range(num_choices):
                assert text_of(before, index) + text_of(rest, index) == text_of(right, index)


async def test_responses_go_on_after_a_sequence_number(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a", "b") as (a, b), http_gateway(a, b) as http, http_gateway(b) as sound:
        mix_up(a, altered)
        body = {"input": "hi", "temperature": 0, "max_output_tokens": 30, "stream": True}
        told = await http.post("/v1/responses", json=body)
        numbered = [block for block in told.text.split("\n\n") if "sequence_number" in block]
        id = json.loads(numbered[0].partition("data: ")[2])["response"]["id"]
        for number in (1, len(numbered) // 2):
            params = {"stream": True, "starting_after": number}
            rest, right = [(await one.get(f"/v1/responses/{id}", params=params)).text for one in (http, sound)]
            assert rest == right
            assert rest.count("sequence_number") == len(numbered) - number - 1
