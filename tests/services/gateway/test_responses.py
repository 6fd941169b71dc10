"""/v1/responses: OpenAI's own client, its event sequence, and the same numbers for who comes back."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from seqmtp_serve.errors import NotReady
from services.gateway.response_stream import NUM_OPENING
from tests.services.gateway.live import serving
from tests.services.gateway.world import fake, http, ids, script, strictly

PATH = "/v1/responses"
ROWS = script("h", "ello", " worst", "opped")
SEQUENCE = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    *["response.output_text.delta"] * 4,
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """(id, data) of each event, whose name must be its type."""
    found = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = json.loads(fields["data"])
        assert fields["event"] == data["type"]
        found.append((fields["id"], data))
    return found


async def test_openais_client_reads_a_whole_response_and_a_stream() -> None:
    coordinator = fake(ROWS)
    async with serving(coordinator) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
        whole = await client.responses.create(model="fake", input="hi", instructions="be brief", temperature=0)
        assert whole.output_text == "hello worstopped"
        assert whole.status == "completed"
        assert whole.instructions == "be brief"
        kinds, text, over = [], "", None
        async for event in await client.responses.create(model="fake", input="hi", stream=True):
            kinds.append(event.type)
            text += event.delta if event.type == "response.output_text.delta" else ""
            over = event.response if event.type == "response.completed" else over
        assert kinds == SEQUENCE
        assert over is not None
        assert over.output_text == text == whole.output_text
        assert over.usage is not None
        assert over.usage.output_tokens == sum(map(len, ROWS))
        async with client.responses.stream(model="fake", input="hi") as helper:
            assert (await helper.get_final_response()).output_text == text
    expected = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert list(coordinator.requests[0].prompt_ids) == ids(expected)


async def test_openais_client_starts_in_the_background_and_resumes_by_number() -> None:
    async with serving(fake(ROWS)) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
        started = await client.responses.create(model="fake", input="hi", background=True)
        assert (await client.responses.retrieve(started.id)).output_text == "hello worstopped"
        rest = await client.responses.retrieve(started.id, stream=True, starting_after=5)
        found = [event async for event in rest]
        assert [event.type for event in found] == SEQUENCE[6:]
        assert [event.sequence_number for event in found] == list(range(6, len(SEQUENCE)))
        assert (await client.responses.cancel(started.id)).status == "cancelled"


@pytest.mark.parametrize("stop", [None, "stop"])
async def test_who_comes_back_gets_exactly_the_events_it_lacks(stop: str | None) -> None:
    """By the event's id and by its number alike, wherever it was cut."""
    asked = {"input": "hi", "stop": stop, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    async with http(fake(ROWS)) as client:
        first = events((await client.post(PATH, json={**asked, "stream": True})).text)
        whole = await client.post(PATH, json=asked)
        for _, data in first:
            strictly(ResponseStreamEvent, json.dumps(data))
        strictly(Response, whole.text)
        id = first[0][1]["response"]["id"]
        for cut, (event_id, data) in enumerate(first):
            by_id = await client.get(f"{PATH}/{id}", headers={"Last-Event-ID": event_id})
            again = await client.post(PATH, json={**asked, "stream": True}, headers={"Last-Event-ID": event_id})
            assert again.text == by_id.text
            number = data["sequence_number"]
            by_number = await client.get(f"{PATH}/{id}", params={"stream": "true", "starting_after": number})
            rest = first[cut + 1 :]
            for again in (by_id, by_number):
                assert (events(again.text) if rest else again.text) == (rest or "")
    numbers = [data["sequence_number"] for _, data in first]
    assert numbers == sorted(set(numbers))
    deltas = [data for _, data in first if data["type"] == "response.output_text.delta"]
    assert [data["sequence_number"] for data in deltas] == [NUM_OPENING - 1 + version for version in (1, 2, 3, 4)]
    (part,) = whole.json()["output"][0]["content"]
    assert "".join(data["delta"] for data in deltas) == part["text"]
    assert [one for data in deltas for one in data["logprobs"]] == part["logprobs"]
    assert first[-1][1]["response"]["output"][0]["content"] == [part]


async def test_a_spent_budget_is_incomplete_and_says_why() -> None:
    async with http(fake(ROWS)) as client:
        whole = (await client.post(PATH, json={"input": "hi", "max_output_tokens": 2})).json()
        found = events((await client.post(PATH, json={"input": "hi", "max_output_tokens": 2, "stream": True})).text)
        later = (await client.get(f"{PATH}/{whole['id']}")).json()
    assert whole["status"] == later["status"] == found[-1][1]["response"]["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found[-1][1]["type"] == "response.incomplete"
    assert whole["output"] == later["output"]
    assert whole["usage"] == later["usage"]


async def test_items_become_messages_and_labels_are_repeated() -> None:
    coordinator = fake(ROWS)
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "ho", "annotations": []}]},
        {"role": "user", "content": "and?"},
    ]
    fields = {"metadata": {"a": "b"}, "store": False, "user": "u", "tools": [], "truncation": "disabled"}
    async with http(coordinator) as client:
        answer = await client.post(PATH, json={"input": items, **fields, "text": {"format": {"type": "text"}}})
    assert (answer.json()["metadata"], answer.json()["user"]) == ({"a": "b"}, "u")
    turns = [("system", "be brief"), ("user", "hi"), ("assistant", "ho"), ("user", "and?")]
    expected = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    assert list(coordinator.requests[0].prompt_ids) == ids(expected + "<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp-1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "nope"}}}}, "text.format"),
        ({"include": ["reasoning.encrypted_content"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"max_tokens": 2}, "max_tokens"),
        ({"max_completion_tokens": 2}, "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"echo": True}, "echo"),
        ({"logprobs": True}, "logprobs"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "json_schema": {}}}}, "text.format.json_schema"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input[0].output"),
        ({"input": [{"type": "function_call", "call_id": "x", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "x"}]}, "input[0].function"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ],
)
async def test_what_is_not_supported_is_400_and_names_its_field(fields: dict[str, Any], param: str) -> None:
    coordinator = fake()
    async with http(coordinator) as client:
        answer = await client.post(PATH, json={"input": "hi", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert coordinator.requests == []


async def test_other_routes_answers_and_numbers_that_never_were_are_refused() -> None:
    async with http(fake(ROWS)) as client:
        chat = (await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})).json()
        id = (await client.post(PATH, json={"input": "hi"})).json()["id"]
        assert (await client.get(f"{PATH}/{chat['id']}")).status_code == 404
        assert (await client.get(f"{PATH}/resp-none")).status_code == 404
        beyond = await client.get(f"{PATH}/{id}", params={"starting_after": 99})
        wrong = await client.get(f"{PATH}/{id}", headers={"Last-Event-ID": "resp-other:0:1"})
        repeated = [
            await client.post(PATH, json=body, headers={"Last-Event-ID": event_id})
            for body, event_id in (
                ({"input": "another"}, f"{id}:0:1"),
                ({"input": "hi"}, "resp-none:0:1"),
                ({"input": "hi"}, "garbage"),
            )
        ]
    assert [answer.status_code for answer in repeated] == [409, 404, 400]
    assert beyond.json()["error"]["code"] == "store_behind"
    assert wrong.json()["error"]["param"] == "Last-Event-ID"


async def test_an_error_after_the_beginning_is_the_last_event() -> None:
    async with http(fake(ROWS, error=NotReady("gone"), error_at=3)) as client:
        found = events((await client.post(PATH, json={"input": "hi", "stream": True})).text)
        before = await client.post(PATH, json={"input": "hi", "stream": True, "model": "other"})
    assert found[-1][1]["type"] == "error"
    assert found[-1][1]["code"] == NotReady.code
    assert before.status_code == 404


async def test_the_tokenizer_can_be_used_from_afar() -> None:
    async with http() as client:
        info = (await client.get("/tokenizer_info")).json()
        kwargs = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"thinking": True}}
        assert (await client.post("/tokenize", json=kwargs)).status_code == 200
        refused = await client.post("/tokenize", json={**kwargs, "continue_final_message": True})
    assert refused.json()["error"]["param"] == "continue_final_message"
    assert info["eos_token"] == "<|im_end|>"
    assert info["model_max_length"] == 2048
    assert "message.role" in info["chat_template"]
