"""Random bodies on every route, thoughts and calls among them: each answer is the same with and without drafts."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from typing import Any

import httpx
import pytest
from jsonschema import validate
from tokenizers import AddedToken, Tokenizer

from services.gateway.chat_template import ChatTemplate
from services.gateway.reasoning import CLOSE, OPEN
from services.gateway.text_model import TextModel
from tests.services.byte_tokenizer import byte_tokenizer
from tests.services.gateway.real_engine import served
from tests.services.gateway.test_reasoning import SWITCHED
from tests.services.gateway.test_shaped_answers import FORMAT, FORMS, SCHEMA, TOOL, random_fields, random_shaping
from tests.services.gateway.world import CHAT, MESSAGES, TEXT

COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
FLAT = {"type": "function", "name": "judge", "parameters": SCHEMA}
NAMED = {"type": "function", "name": "judge"}
RESPONSE_FORMS: list[dict[str, Any]] = [
    {},
    {"text": {"format": {"type": "json_schema", "name": "verdict", "schema": SCHEMA}}},
    {"text": {"format": {"type": "json_object"}}},
    {"structured_outputs": {"choice": ["left", "leftmost", "right"]}},
    {"tools": [FLAT], "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": [FLAT], "tool_choice": NAMED},
    {"tools": [{**FLAT, "strict": True}], "instructions": "be brief"},
    {"tools": [FLAT], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}},
]
# Of its own run: names, times, what a cache had, what drafts earned.
UNTOLD = {"id", "call_id", "created", "created_at", "speculation", "metrics"} | {
    f"{side}_tokens_details" for side in ("prompt", "input")
}


def tokenizer_with_tags() -> Tokenizer:
    """The tags of a thought are single tokens, so that a made-up model comes upon the one that ends it."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(tag, special=True) for tag in (OPEN, CLOSE)])
    return tokenizer


def thinking_model() -> TextModel:
    template = ChatTemplate(SWITCHED + "{% if tools %}{% endif %}")
    return replace(TEXT, tokenizer=tokenizer_with_tags(), template=template)


CLOSE_ID = tokenizer_with_tags().token_to_id(CLOSE)


def random_body(draws: random.Random) -> tuple[str, dict[str, Any]]:
    """A route, and what is asked of it."""
    path = draws.choice([CHAT, COMPLETIONS, RESPONSES, RESPONSES])
    if path == COMPLETIONS:
        fields: dict[str, Any] = {"prompt": draws.choice(["hello", ["a", "the world"], [5, 6, 7]]), "max_tokens": 40}
        fields |= {"echo": draws.random() < 0.5, "logprobs": draws.choice([None, 0, 3])}
        fields |= {"prompt_logprobs": draws.choice([None, 2])}
        forms: list[dict[str, Any]] = [form for form in FORMS if "tools" not in form]
        return path, random_shaping(draws) | fields | draws.choice(forms)
    if path == CHAT:
        fields = {"messages": MESSAGES, "max_tokens": 120, **random_fields(draws)}
    else:
        fields = {"input": "hi", "max_output_tokens": 120, **random_shaping(draws), **draws.choice(RESPONSE_FORMS)}
        if draws.random() < 0.5:
            fields |= {"include": ["message.output_text.logprobs"], "top_logprobs": draws.randint(0, 3)}
    if draws.random() < 0.5:
        fields["chat_template_kwargs"] = {"thinking": True}
        fields["logit_bias"] = {**fields.get("logit_bias", {}), str(CLOSE_ID): draws.choice([3, 5])}
        fields.pop("allowed_token_ids", None)
    return path, fields


def told(value: Any) -> Any:
    """An answer without what is of its own run."""
    if isinstance(value, dict):
        return {name: told(each) for name, each in value.items() if name not in UNTOLD and "prediction_" not in name}
    return [told(each) for each in value] if isinstance(value, list) else value


async def answered(client: httpx.AsyncClient, path: str, fields: dict[str, Any], depth: int) -> Any:
    """The whole answer; a response at depth 3 is read from its stream. Or why there is none."""
    is_stream = path == RESPONSES and depth == 3
    body = {**fields, "speculation": {"max_depth": depth}, "stream": is_stream}
    answer = await client.post(path, json=body)
    if is_stream and answer.status_code == 200:
        last = json.loads(answer.text.strip().split("\n\n")[-1].split("data: ", 1)[1])
        return told(last["response"]) if "response" in last else last["code"]
    data = answer.json()
    if "choices" in data or "output" in data:
        return told(data)
    assert data["error"]["code"] == "no_token_left", answer.text
    return data["error"]["code"]


@pytest.mark.covers(72, 157)
async def test_random_bodies_on_every_route_give_one_answer_with_and_without_drafts() -> None:
    draws = random.Random(5)
    bodies = [random_body(draws) for _ in range(36)]
    asked = {name for _, body in bodies for name in body}
    assert asked >= {"text", "tools", "tool_choice", "chat_template_kwargs", "echo", "prompt_logprobs", "include"}
    async with served(thinking_model(), max_model_len=320) as (client, coordinator):

        async def all_of(depth: int) -> list[Any]:
            return await asyncio.gather(*(answered(client, path, body, depth) for path, body in bodies))

        plain = await all_of(0)
        for depth in (1, 3):
            for (path, body), one, other in zip(bodies, await all_of(depth), plain, strict=True):
                assert one == other, (path, body)
        assert coordinator.accepted > 0
    assert sum(answer != "no_token_left" for answer in plain) > len(bodies) // 2
    written = json.dumps(plain)
    assert '"reasoning_text"' in written
    assert '"reasoning_content"' in written
    assert '"function_call"' in written


@pytest.mark.covers(72)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 6}], ids=["greedy", "seeded"])
async def test_what_is_constrained_after_a_thought_is_the_same_at_every_depth(sampling: dict[str, Any]) -> None:
    fields = {
        "messages": MESSAGES,
        "max_tokens": 200,
        "chat_template_kwargs": {"thinking": True},
        "logit_bias": {str(CLOSE_ID): 4},
        **sampling,
    }
    forced = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    async with served(thinking_model(), max_model_len=256) as (client, _):
        for form in ({"response_format": FORMAT}, forced):
            answers = [await answered(client, CHAT, {**fields, **form}, depth) for depth in (0, 1, 2, 3)]
            assert answers == answers[:1] * 4
            (choice,) = answers[0]["choices"]
            message = choice["message"]
            assert message["reasoning"]
            assert answers[0]["usage"]["completion_tokens_details"]["reasoning_tokens"] > 1
            calls = message.get("tool_calls")
            validate(json.loads(calls[0]["function"]["arguments"] if calls else message["content"]), SCHEMA)
