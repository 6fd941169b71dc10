"""/v1/responses with tools, thoughts and formats: the items, their events, and the same numbers for who comes back."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from tests.services.gateway.live import serving
from tests.services.gateway.real_engine import served
from tests.services.gateway.test_reasoning import thinking
from tests.services.gateway.test_responses import PATH, events
from tests.services.gateway.tools.test_tool_calls import CALLS, TEXT, rows
from tests.services.gateway.world import TOKENIZER, fake, http, strictly

TOOLS = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("get_weather", "f")]
THOUGHT = "hm, <tool_call>"
WHOLE = f"<think>{THOUGHT}</think>\n\n{TEXT}\nDone."


def kinds(item: dict[str, Any]) -> str:
    return str(item["type"])


def rebuilt(found: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Type and text of each item, from the deltas alone; checks each item's ending against them."""
    items: dict[str, tuple[str, str]] = {}
    for data in found:
        kind = data["type"].removeprefix("response.")
        if kind == "output_item.added":
            items[data["item"]["id"]] = (data["item"]["type"], "")
        elif kind.endswith(".delta"):
            what, text = items[data["item_id"]]
            items[data["item_id"]] = (what, text + data["delta"])
        elif kind.endswith(("text.done", "arguments.done")):
            assert items[data["item_id"]][1] == data.get("text", data.get("arguments"))
    return list(items.values())


@pytest.mark.parametrize("size", [1, 3, 7, 200])
async def test_thought_text_and_calls_are_items_in_any_cutting(size: int) -> None:
    async with http(fake(rows(WHOLE, size)), text=thinking()) as client:
        body = {"input": "hi", "tools": TOOLS}
        whole = await client.post(PATH, json=body)
        first = events((await client.post(PATH, json={**body, "stream": True})).text)
        strictly(Response, whole.text)
        for _, data in first:
            strictly(ResponseStreamEvent, json.dumps(data))
        output = whole.json()["output"]
        assert list(map(kinds, output)) == ["reasoning", "message", "function_call", "function_call", "message"]
        assert [(item["name"], item["arguments"]) for item in output[2:4]] == CALLS
        assert (output[0]["content"][0]["text"], output[1]["content"][0]["text"]) == (THOUGHT, "Let me look.")
        assert output[4]["content"][0]["text"] == "\nDone."
        assert len({item["id"] for item in output}) == 5
        assert whole.json()["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        found = [data for _, data in first]
        told = [("reasoning", THOUGHT), ("message", "Let me look."), *(("function_call", text) for _, text in CALLS)]
        assert rebuilt(found) == [*told, ("message", "\nDone.")]
        numbers = [data["sequence_number"] for data in found]
        assert numbers == sorted(set(numbers))
        assert found[-1]["type"] == "response.completed"
        own = {"id": "", "call_id": ""}  # of this response
        assert [item | own for item in found[-1]["response"]["output"]] == [item | own for item in output]
        id = found[0]["response"]["id"]
        later = (await client.get(f"{PATH}/{id}")).json()
        assert later["output"] == found[-1]["response"]["output"]
        for cut, (event_id, data) in list(enumerate(first))[:: max(1, len(first) // 6)]:
            by_id = await client.get(f"{PATH}/{id}", headers={"Last-Event-ID": event_id})
            after = {"stream": "true", "starting_after": data["sequence_number"]}
            by_number = await client.get(f"{PATH}/{id}", params=after)
            for again in (by_id.text, by_number.text):
                assert (events(again) if again else []) == first[cut + 1 :]
        beyond = await client.get(f"{PATH}/{id}", params={"starting_after": 10**6})
        assert beyond.json()["error"]["code"] == "store_behind"


@pytest.mark.parametrize("size", [1, 4, 200])
async def test_a_call_that_a_stop_string_cuts_is_incomplete(size: int) -> None:
    async with http(fake(rows(TEXT, size))) as client:
        body = {"input": "hi", "tools": TOOLS, "stop": ['}"']}
        whole = (await client.post(PATH, json=body)).json()
        last = events((await client.post(PATH, json={**body, "stream": True})).text)[-1][1]["response"]
        later = (await client.get(f"{PATH}/{last['id']}")).json()
    for answer in (whole, last, later):
        message, *calls = answer["output"]
        assert answer["status"] == message["status"] == "completed"
        assert [(call["arguments"], call["status"]) for call in calls] == [
            ('{"city": "Oslo"}', "completed"),
            ('{"a": [1, "', "incomplete"),
        ]


async def test_the_numbers_do_not_depend_on_the_cutting() -> None:
    """A client that was cut at one record's rows goes on at another's, if those have the same tokens."""
    last: dict[int, list[int]] = {}
    for size in (2, 5):
        async with http(fake(rows(WHOLE, size)), text=thinking()) as client:
            body = {"input": "hi", "tools": TOOLS, "stream": True}
            found = [data for _, data in events((await client.post(PATH, json=body)).text)]
        last[size] = [data["sequence_number"] for data in found if data["type"].endswith((".added", ".done"))]
    assert last[2] == last[5]


async def test_openais_client_calls_and_answers() -> None:
    coordinator = fake(rows(TEXT, 4))
    async with serving(coordinator) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
        async with client.responses.stream(model="fake", input="hi", tools=TOOLS) as helper:
            final = await helper.get_final_response()
        calls = [item for item in final.output if item.type == "function_call"]
        assert [(call.name, call.arguments) for call in calls] == CALLS
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "42"} for call in calls]
        asked: Any = [{"role": "user", "content": "hi"}, *(item.to_dict() for item in final.output), *results]
        await client.responses.create(model="fake", input=asked, tools=TOOLS)
    prompt = TOKENIZER.decode(list(coordinator.requests[-1].prompt_ids), skip_special_tokens=False)
    assert "assistant\nLet me look.\n<tool_call>\n" in prompt
    assert prompt.count("<tool_response>\n42\n</tool_response>") == 2


async def test_a_format_and_a_forced_call_constrain_the_text() -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "name": "f", "parameters": schema, "strict": True}
    sampled = {"temperature": 1.1, "seed": 2, "max_output_tokens": 250}
    async with served(max_model_len=1024) as (client, _):
        texts, calls = set(), set()
        for depth in (0, 3):
            fields = {"input": "hi", "speculation": {"max_depth": depth}, **sampled}
            wanted = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
            answer = (await client.post(PATH, json={**fields, "text": wanted})).json()
            assert answer["text"]["format"]["schema"] == schema
            texts.add(answer["output"][0]["content"][0]["text"])
            choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
            forced = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
            answer = (await client.post(PATH, json={**fields, **forced})).json()
            assert (answer["tool_choice"], answer["parallel_tool_calls"]) == (choice, False)
            (call,) = answer["output"]
            calls.add((call["name"], call["arguments"]))
    for texts_ in (texts, {arguments for _, arguments in calls}):
        (text,) = texts_
        assert set(json.loads(text)) == {"ok"}
