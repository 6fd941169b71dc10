"""Tool calls through the API: whole and streamed, in any cutting into rows, resumed, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from services.gateway.text_model import TextModel
from services.gateway.tools.dialects import DEEPSEEK, HERMES, dialect_of
from tests.services.gateway.live import serving
from tests.services.gateway.world import CHAT, EOS_ID, MESSAGES, TOKENIZER, fake, http, ids, streamed, strictly

TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Now.", "parameters": {"type": "object", "properties": {}}},
    },
    {"type": "function", "function": {"name": "f"}},
]
TEXT = (
    'Let me look. <tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
    '\n<tool_call>{"name": "f", "arguments": {"a": [1, "}"]}}</tool_call>'
)
CALLS = [("get_weather", '{"city": "Oslo"}'), ("f", '{"a": [1, "}"]}')]


def rows(text: str, size: int) -> list[list[int]]:
    """The text in rows of `size` tokens, as a round of that progress commits them."""
    tokens = [*ids(text), EOS_ID]
    return [tokens[place : place + size] for place in range(0, len(tokens), size)]


def put_together(deltas: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
    """What a client makes of the deltas of a stream."""
    text, calls = "", {}
    for delta in deltas:
        text += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            found = calls.setdefault(call["index"], {"name": "", "arguments": ""})
            if "id" in call:
                found["name"] = call["function"]["name"]
            found["arguments"] += call["function"]["arguments"]
    return text, [(call["name"], call["arguments"]) for _, call in sorted(calls.items())]


async def test_a_call_that_a_stop_string_cuts_is_not_said_to_be_whole() -> None:
    async with http(fake(rows(TEXT, 4))) as client:
        fields: dict[str, Any] = {"tools": TOOLS, "stop": ["slo"]}
        whole = (await client.post(CHAT, json={"messages": MESSAGES, **fields})).json()["choices"][0]
        chunks = [data for _, data in await streamed(client, **fields) if data != "[DONE]"]
    (call,) = whole["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "O'
    last = chunks[-1]["choices"][0]
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", "slo")
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "slo")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 200])
async def test_streamed_calls_equal_whole_ones_in_any_cutting_into_rows(size: int) -> None:
    async with http(fake(rows(TEXT, size))) as client:
        body = {"messages": MESSAGES, "tools": TOOLS}
        whole = await client.post(CHAT, json=body)
        chunks = [data for _, data in await streamed(client, tools=TOOLS) if data != "[DONE]"]
    strictly(ChatCompletion, whole.text)
    message = whole.json()["choices"][0]["message"]
    assert message["content"] == "Let me look."
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]] == CALLS
    assert whole.json()["choices"][0]["finish_reason"] == "tool_calls"
    for chunk in chunks:
        strictly(ChatCompletionChunk, json.dumps(chunk))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert put_together(deltas) == ("Let me look.", CALLS)
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert deltas[-1] == {}
    arguments = [call for delta in deltas for call in delta.get("tool_calls", ()) if "id" not in call]
    assert size > 7 or len(arguments) > 2, "arguments come as they are written"


async def test_a_resumed_stream_has_the_same_calls_with_the_same_ids() -> None:
    async with http(fake(rows(TEXT, 3))) as client:
        found = await streamed(client, tools=TOOLS)
        job = found[0][1]["id"]
        for place, (event_id, _) in enumerate(found[:-1]):
            rest = await client.get(f"{CHAT}/{job}", headers={"Last-Event-ID": event_id or ""})
            again = [line[6:] for line in rest.text.split("\n") if line.startswith("data: ")]
            assert [json.loads(line) for line in again[:-1]] == [data for _, data in found[place + 1 : -1]]


async def test_openais_client_reads_the_calls() -> None:
    async with (
        serving(fake(rows(TEXT, 4))) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client,
        client.chat.completions.stream(model="fake", messages=MESSAGES, tools=TOOLS) as helper,
    ):
        message = (await helper.get_final_completion()).choices[0].message
    assert message.tool_calls is not None
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == CALLS


async def test_without_tools_or_with_choice_none_the_text_is_content() -> None:
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        async with http(fake(rows(TEXT, 3))) as client:
            choice = (await client.post(CHAT, json={"messages": MESSAGES, **more})).json()["choices"][0]
        assert choice["message"]["content"] == TEXT
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


async def test_one_call_where_parallel_ones_are_not_wanted() -> None:
    async with http(fake(rows(TEXT, 3))) as client:
        body = {"messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": False}
        message = (await client.post(CHAT, json=body)).json()["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]


async def test_the_model_is_told_of_tools_and_of_past_calls() -> None:
    coordinator = fake()
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    async with http(coordinator) as client:
        assert (await client.post(CHAT, json={"messages": messages, "tools": TOOLS})).status_code == 200
    prompt = TOKENIZER.decode(list(coordinator.requests[0].prompt_ids), skip_special_tokens=False)
    assert "Be brief.\n\nYou may call functions." in prompt
    assert '"name": "get_weather"' in prompt
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in prompt
    assert "<tool_response>\n42\n</tool_response>" in prompt


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "x"}}]}]},
            "messages[0].tool_calls[0].function",
        ),
    ],
)
async def test_what_cannot_be_asked_is_refused_by_name(more: dict[str, Any], param: str) -> None:
    async with http() as client:
        answer = await client.post(CHAT, json={"messages": MESSAGES, **more})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_templates_say_which_dialect_their_model_writes(shipped: TextModel) -> None:
    assert shipped.template is not None
    assert shipped.template.dialect is HERMES
    assert dialect_of("{{ '<｜Assistant｜>' }}") is DEEPSEEK
    prompt = shipped.template.render([{"role": "user", "content": "hi"}], tools=TOOLS)
    assert prompt.startswith("<|im_start|>system\nYou may call functions.")
    assert prompt.count("<|im_start|>system") == 1


@pytest.fixture
def shipped() -> TextModel:
    from services.gateway.text_model import open_text_model

    return open_text_model("smollm2-135m-instruct")
