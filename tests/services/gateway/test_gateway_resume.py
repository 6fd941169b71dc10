"""A stream that a client goes on with, at any event, is byte for byte the rest of the stream it had."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmtp_serve.errors import InvalidField, StoreBehind
from seqmtp_serve.request import CommittedRow, FinishReason
from services.gateway.cursor import Cursor, Position, Progress, parse_cursor
from services.gateway.fake import FakeCoordinator
from services.gateway.splice import Splice
from tests.services.gateway.live import serving
from tests.services.gateway.world import CHAT, EOS_ID, MESSAGES, app_over, events, fake, http, ids, script

COMPLETIONS = "/v1/completions"
# Characters of several tokens that are cut by rows, and a stop string that begins in one row and ends in another.
EMOJI = ids("a😀b")
ROWS = [EMOJI[:1], EMOJI[1:3], EMOJI[3:], *script("hell", "o wor", "ld EN", "D never")]


def other_gateway(coordinator: FakeCoordinator) -> httpx.AsyncClient:
    """Another process, as far as it shares nothing with the first but the coordinators."""
    transport = httpx.ASGITransport(app_over(coordinator), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://other")


def blocks(body: str) -> list[str]:
    return body.removesuffix("\n\n").split("\n\n")


def id_of(block: str) -> str:
    return block.split("\n")[0].removeprefix("id: ")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stop", [None, "END", ["o", "never"]])
@pytest.mark.parametrize("trace", [False, True])
async def test_from_every_event_the_rest_is_byte_for_byte_the_same(path: str, stop: Any, trace: bool) -> None:
    coordinator = fake(ROWS)
    asked = {"messages": MESSAGES} if path == CHAT else {"prompt": "p"}
    body = {**asked, "stop": stop, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 200}
    body |= {"speculation": {"trace": trace}}
    async with http(coordinator) as client, other_gateway(coordinator) as other:
        whole = blocks((await client.post(path, json=body)).text)
        assert all(block.startswith("id: ") for block in whole)
        assert len({id_of(block) for block in whole}) == len(whole)
        url = f"{path}/{parse_cursor(id_of(whole[0])).job_id}"
        assert blocks((await other.get(url, params={"stream": True})).text) == whole
        for place, block in enumerate(whole[:-1]):
            rest = await other.get(url, headers={"Last-Event-ID": id_of(block)})
            assert rest.headers["content-type"].startswith("text/event-stream")
            assert blocks(rest.text) == whole[place + 1 :]
        assert (await other.get(url, headers={"Last-Event-ID": id_of(whole[-1])})).status_code == 204
        again = await other.post(path, json=body, headers={"Last-Event-ID": id_of(whole[2])})
        assert blocks(again.text) == whole[3:]
        different = await other.post(path, json=body | {"temperature": 0}, headers={"Last-Event-ID": id_of(whole[2])})
        assert (different.status_code, different.json()["error"]["code"]) == (409, "idempotency_conflict")


async def test_several_choices_go_on_each_from_where_it_was() -> None:
    coordinator = fake(ROWS)
    async with http(coordinator) as client, other_gateway(coordinator) as other:
        body = {"messages": MESSAGES, "n": 3, "stream": True, "stop": "END", "max_tokens": 200}
        whole = blocks((await client.post(CHAT, json=body)).text)
        job_id = parse_cursor(id_of(whole[0])).job_id
        for place, block in enumerate(whole[:-1]):
            rest = blocks((await other.get(f"{CHAT}/{job_id}", headers={"Last-Event-ID": id_of(block)})).text)
            for index in range(3):
                assert chunks_of(whole[: place + 1] + rest, index) == chunks_of(whole, index)
            assert rest[-1] == whole[-1]


def chunks_of(parts: list[str], index: int) -> list[Any]:
    """One choice's chunks; how the choices are interleaved is not part of the promise."""
    found = [data for _, data in events("\n\n".join(parts)) if data != "[DONE]"] if parts else []
    return [chunk for chunk in found if chunk["choices"][0]["index"] == index]


async def test_a_sequence_number_is_a_cursor_of_one_choice() -> None:
    coordinator = fake(ROWS)
    async with http(coordinator) as client:
        body = {"messages": MESSAGES, "stream": True, "max_tokens": 200}
        whole = blocks((await client.post(CHAT, json=body)).text)
        job_id = parse_cursor(id_of(whole[0])).job_id
        numbers = [data["sequence_number"] for _, data in events("\n\n".join(whole[:-1]))]
        for number in range(max(numbers) + 1):
            rest = blocks((await client.get(f"{CHAT}/{job_id}", params={"starting_after": number})).text)
            after = [block for block, its in zip(whole, numbers, strict=False) if its > number]
            assert rest == [*(after if number else whole[:-1]), whole[-1]]
        ahead = await client.get(f"{CHAT}/{job_id}", params={"starting_after": 99})
        assert ahead.json()["error"]["code"] == "store_behind"
        for wrong in ("1,1", "-1", "1,", "x", "1.5"):
            refused = await client.get(f"{CHAT}/{job_id}", params={"starting_after": wrong})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "starting_after")


@pytest.mark.parametrize("stop", [None, "END", ["lo wor", "zz"]])
async def test_several_choices_have_a_sequence_number_each(stop: Any) -> None:
    """A client that has choice 0 up to one row and choice 1 up to another gets the rest of each, and nothing again."""
    coordinator = fake(ROWS)
    async with http(coordinator) as client, other_gateway(coordinator) as other:
        options = {"include_usage": True}
        body = {"messages": MESSAGES, "n": 2, "stream": True, "stop": stop, "stream_options": options}
        whole = blocks((await client.post(CHAT, json=body | {"max_tokens": 200})).text)
        url = f"{CHAT}/{parse_cursor(id_of(whole[0])).job_id}"
        chunks = [chunks_of(whole[:-2], index) for index in range(2)]
        highest = max(chunk["sequence_number"] for chunk in chunks[0])
        for first in range(highest + 1):
            second = (3 * first + 2) % (highest + 1)
            rest = blocks((await other.get(url, params={"starting_after": f"{first},{second}"})).text)
            has_usage = (first, second) != (highest, highest)
            for index, number in enumerate((first, second)):
                left = [chunk for chunk in chunks[index] if not number or chunk["sequence_number"] > number]
                assert chunks_of(rest[: -2 if has_usage else -1], index) == left
            assert rest[-1] == whole[-1]
            assert (rest[-2:] == whole[-2:]) == has_usage
        assert len(blocks((await other.get(url, params={"starting_after": 0})).text)) == len(whole)
        refused = await other.get(url, params={"starting_after": 1})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "starting_after")
        assert "give 2" in refused.json()["error"]["message"]
        ahead = await other.get(url, params={"starting_after": f"1,{highest + 1}"})
        assert ahead.json()["error"]["code"] == "store_behind"


async def test_a_text_that_is_not_the_clients_is_never_continued() -> None:
    coordinator = fake(ROWS)
    async with http(coordinator) as client:
        whole = blocks((await client.post(CHAT, json={"messages": MESSAGES, "stream": True, "max_tokens": 200})).text)
        job_id = parse_cursor(id_of(whole[0])).job_id
        coordinator.script = [ids("z"), *ROWS[1:]]  # the store lost rows, and an unseeded text came out otherwise
        rest = events((await client.get(f"{CHAT}/{job_id}", headers={"Last-Event-ID": id_of(whole[3])})).text)
        assert [data if data == "[DONE]" else data["error"]["code"] for _, data in rest] == ["store_behind", "[DONE]"]
        coordinator.script = [[*ids("a"), EOS_ID]]  # or ended before
        rest = events((await client.get(f"{CHAT}/{job_id}", headers={"Last-Event-ID": id_of(whole[3])})).text)
        assert [data if data == "[DONE]" else data["error"]["code"] for _, data in rest] == ["store_behind", "[DONE]"]


async def test_rows_that_are_cut_otherwise_give_the_same_rest_of_the_text() -> None:
    coordinator = fake(ROWS)
    async with http(coordinator) as client:
        whole = blocks((await client.post(CHAT, json={"messages": MESSAGES, "stream": True, "max_tokens": 200})).text)
        job_id = parse_cursor(id_of(whole[0])).job_id
        tokens = [token for row in ROWS for token in row]
        coordinator.script = [tokens[:1], *(tokens[at : at + 5] for at in range(1, len(tokens), 5))]
        for place in range(len(whole) - 1):
            rest = (await client.get(f"{CHAT}/{job_id}", headers={"Last-Event-ID": id_of(whole[place])})).text
            assert text_of(whole[: place + 1]) + text_of(blocks(rest)) == text_of(whole)


def text_of(parts: list[str]) -> str:
    found = [data for _, data in events("\n\n".join(parts)) if data != "[DONE]"]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in found if chunk["choices"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_repeated_post_with_a_key_is_the_same_request(stream: bool) -> None:
    coordinator = fake(ROWS)
    key = {"Idempotency-Key": "order-66"}
    body = {"messages": MESSAGES, "max_tokens": 200}
    async with http(coordinator) as client, other_gateway(coordinator) as other:
        first = await client.post(CHAT, json=body | {"stream": stream}, headers=key)
        again = await other.post(CHAT, json=body | {"stream": stream}, headers=key)
        assert again.text == first.text
        other_form = await other.post(CHAT, json=body | {"stream": not stream}, headers=key)
        assert other_form.status_code == 200
        assert len({request.request_id for request in coordinator.requests}) == 1
        conflict = await other.post(CHAT, json=body | {"temperature": 0.5}, headers=key)
        assert (conflict.status_code, conflict.json()["error"]["code"]) == (409, "idempotency_conflict")
        fresh = await client.post(CHAT, json=body, headers={"Idempotency-Key": "order-67"})
        assert fresh.status_code == 200
        assert len({request.request_id for request in coordinator.requests}) == 2
        for wrong in ("", "x" * 256, "a b"):
            refused = await client.post(CHAT, json=body, headers={"Idempotency-Key": wrong})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Idempotency-Key")


async def test_a_background_answer_is_asked_for_later_and_can_be_cancelled() -> None:
    coordinator = fake(ROWS)
    coordinator.committed = 0
    async with http(coordinator) as client:
        body = {"messages": MESSAGES, "background": True, "max_tokens": 200, "n": 2}
        queued = (await client.post(CHAT, json=body)).json()
        assert (queued["status"], [choice["finish_reason"] for choice in queued["choices"]]) == ("queued", [None] * 2)
        assert all(meta == "1" for _, kept in coordinator._started.values() for meta in [kept["background"]])
        assert coordinator.requests == []  # nobody reads
        url = f"{CHAT}/{queued['id']}"
        coordinator.committed = 4
        running = (await client.get(url)).json()
        assert running["status"] == "in_progress"
        assert running["choices"][1]["message"]["content"] == "a😀bhell"
        coordinator.committed = None
        done = (await client.get(url)).json()
        assert (done["status"], done["object"]) == ("completed", "chat.completion")
        assert done["choices"][0]["message"]["content"] == "a😀bhello world END never"
        assert (done["id"], done["created"]) == (queued["id"], queued["created"])
        coordinator.committed = 4
        cancelled = (await client.post(f"{url}/cancel")).json()
        assert cancelled["status"] == "cancelled"
        assert cancelled["choices"][0]["message"]["content"] == "a😀bhell"
        stream = await client.get(url, params={"stream": True})
        assert (stream.status_code, stream.json()["error"]["code"]) == (409, "request_cancelled")


async def test_what_cannot_be_resumed_is_named() -> None:
    coordinator = fake(ROWS)
    async with http(coordinator) as client:
        job_id = (await client.post(CHAT, json={"messages": MESSAGES})).json()["id"]
        for url, header, status in (
            (f"{CHAT}/{job_id}", "nonsense", 400),
            (f"{CHAT}/{job_id}", "chatcmpl-another:1@1.f66ce3", 400),
            (f"{CHAT}/{job_id}", f"{job_id}:1@1.f66ce3,0", 400),
            (f"{CHAT}/unknown", None, 404),
            (f"{CHAT}/chatcmpl-unknown", None, 404),
            (f"{COMPLETIONS}/{job_id}", None, 404),
            (f"{COMPLETIONS}/{job_id}/cancel", None, 405),
        ):
            answer = await client.get(url, headers={} if header is None else {"Last-Event-ID": header})
            assert answer.status_code == status, url
            assert answer.json()["error"]["message"]
        lost = await client.post(CHAT, json={"messages": MESSAGES}, headers={"Last-Event-ID": "chatcmpl-unknown:1"})
    assert lost.status_code == 404
    assert lost.json()["error"]["param"] == "Last-Event-ID"
    assert "no answer 'chatcmpl-unknown' here" in lost.json()["error"]["message"]


async def test_openais_client_reads_keys_background_answers_and_resumed_streams() -> None:
    coordinator = fake(ROWS, delay_s=0.002)
    async with serving(coordinator) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
        stream = await client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            extra_headers={"Idempotency-Key": "k"},
            extra_body={"background": True},
        )
        head, answer_id = "", ""
        async for chunk in stream:
            head, answer_id = head + (chunk.choices[0].delta.content or ""), chunk.id
            number = chunk.model_extra["sequence_number"]
            if number == 4:
                break
        await stream.close()
        tail = await client.get(
            f"/chat/completions/{answer_id}",
            options={"params": {"starting_after": number}},
            cast_to=openai.types.chat.ChatCompletion,
            stream=True,
            stream_cls=openai.AsyncStream[openai.types.chat.ChatCompletionChunk],
        )
        rest = [chunk.choices[0].delta.content or "" async for chunk in tail if chunk.choices]
        assert head + "".join(rest) == "a😀bhello world END never"
        kept = await client.chat.completions.retrieve(answer_id)
        assert kept.choices[0].message.content == "a😀bhello world END never"


async def test_curl_goes_on_where_it_was_cut_off() -> None:
    coordinator = fake(ROWS, delay_s=0.002)
    async with serving(coordinator) as url:
        body = '{"prompt":"p","stream":true,"max_tokens":200}'
        whole = await curl("-N", f"{url}{COMPLETIONS}", "-H", "content-type: application/json", "-d", body)
        parts = blocks(whole)
        answer = f"{url}{COMPLETIONS}/{parse_cursor(id_of(parts[0])).job_id}"
        rest = await curl("-N", answer, "-H", f"Last-Event-ID: {id_of(parts[3])}")
        assert blocks(rest) == parts[4:]


async def curl(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec("curl", "-sS", *arguments, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode()


# ---- the decisions ------------------------------------------------------------------------------------------------

PLACES = st.one_of(
    st.none(),
    st.just(Position(version=0)),
    st.builds(
        Position,
        version=st.integers(1, 10**6),
        num_tokens=st.integers(1, 10**6),
        check=st.integers(0, 2**24 - 1).map(lambda number: f"{number:06x}"),
        closed=st.booleans(),
    ),
)


@given(
    cursor=st.builds(
        Cursor,
        job_id=st.sampled_from(["chatcmpl-0f", "cmpl-x"]),
        positions=st.lists(PLACES, min_size=1, max_size=5).map(tuple),
        tail=st.sampled_from(["", "usage", "done"]),
    )
)
def test_a_cursor_survives_the_event_id(cursor: Cursor) -> None:
    assert parse_cursor(str(cursor)) == cursor


@pytest.mark.parametrize(
    "text", ["", "x", "job:", "job:1@", "job:1@2", "job:1@2.xyz", "job:a", "a b:1", "job:1:end", ":1"]
)
def test_anything_else_is_no_cursor(text: str) -> None:
    with pytest.raises(InvalidField):
        parse_cursor(text)


def cut(tokens: list[int], cuts: list[int]) -> list[CommittedRow]:
    """Rows of these tokens, the first of one token."""
    edges = [0, *sorted({1, *(edge for edge in cuts if 0 < edge < len(tokens))}), len(tokens)]
    parts = [tokens[start:stop] for start, stop in pairwise(edges) if stop > start]
    return [
        CommittedRow(
            request_id="r",
            version=version,
            tokens=tuple(part),
            origins="a" * len(part),
            finish=FinishReason.STOP if version == len(parts) else None,
        )
        for version, part in enumerate(parts, 1)
    ]


TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=30)
CUTS = st.lists(st.integers(1, 29), max_size=12)


@given(tokens=TOKENS, first=CUTS, second=CUTS, stops=st.integers(0, 30), other=st.booleans())
def test_a_stream_read_again_in_other_rows_gives_each_token_once(
    tokens: list[int], first: list[int], second: list[int], stops: int, other: bool
) -> None:
    splice, given_rows = Splice(), []
    for row in cut(tokens, first)[:stops]:
        given_rows.append(splice.take(row))
    num_given = sum(len(row.tokens) for row in given_rows if row is not None)
    if num_given == len(tokens):
        return  # it was over
    splice.read_again()
    if other and num_given:
        changed = [(token + (place == num_given - 1)) % 10 for place, token in enumerate(tokens)]
        with pytest.raises(StoreBehind):
            for row in cut(changed, second):
                splice.take(row)
        return
    given_rows += [splice.take(row) for row in cut(tokens, second)]
    new = [row for row in given_rows if row is not None]
    assert [token for row in new for token in row.tokens] == tokens
    assert all(len(row.origins) == len(row.tokens) for row in new)
    assert [row.finish for row in new if row.finish] == [FinishReason.STOP]


@given(tokens=TOKENS, first=CUTS, second=CUTS, seen=st.integers(1, 30))
def test_progress_leaves_exactly_the_tokens_after_the_cursor(
    tokens: list[int], first: list[int], second: list[int], seen: int
) -> None:
    sent = Progress(None)
    position = None
    for row in cut(tokens, first)[:seen]:
        assert sent.advance(row.version, row.tokens) == 0
        position = sent.position
    resumed, left = Progress(position), []
    for row in cut(tokens, second):
        left += row.tokens[resumed.advance(row.version, row.tokens) :]
    assert position is not None
    assert left == tokens[position.num_tokens :]
    resumed.end()
