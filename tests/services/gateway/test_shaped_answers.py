"""From the HTTP body to the committed text, on a small made-up model: shaped answers are the same without drafts."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest
from jsonschema import validate

from tests.services.gateway.real_engine import served
from tests.services.gateway.tools.test_forced_calls import told_in_few_words
from tests.services.gateway.tools.test_tool_calls import put_together
from tests.services.gateway.world import CHAT, MESSAGES, events, ids
from tests.unit.engine.test_structured_text import MODEL

# Short enough to end within its budget whatever white space a made-up model puts between the parts.
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


async def answered(client: httpx.AsyncClient, *, depth: int, stream: bool = False, **fields: Any) -> list[Any]:
    """For each choice its text, calls, scored tokens and end; or why there is no answer."""
    body = {"messages": MESSAGES, "max_tokens": 48, "speculation": {"max_depth": depth}, "stream": stream, **fields}
    answer = await client.post(CHAT, json=body)
    data = [answer.json()] if not stream or answer.status_code != 200 else [one for _, one in events(answer.text)[:-1]]
    if errors := [one["error"]["code"] for one in data if "error" in one]:
        assert errors == ["no_token_left"], answer.text
        return errors
    found = []
    for index in range(fields.get("n", 1)):
        mine = [choice for one in data for choice in one["choices"] if choice["index"] == index]
        deltas = [choice.get("delta") or choice["message"] for choice in mine if choice.get("delta") != {}]
        text, calls = put_together([as_delta(delta) for delta in deltas])
        scored = [token for choice in mine for token in (choice["logprobs"] or {"content": []})["content"]]
        found.append((text, calls, scored, mine[-1]["finish_reason"], mine[-1]["stop_reason"]))
    return found


def as_delta(message: dict[str, Any]) -> dict[str, Any]:
    """A whole message as one delta: its calls are numbered."""
    calls = [{"index": place, **call} for place, call in enumerate(message.get("tool_calls") or ())]
    return {**message, "tool_calls": calls}


TOOL = {"type": "function", "function": {"name": "judge", "parameters": SCHEMA}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA}}
FORMS: list[dict[str, Any]] = [
    {},
    {},
    {"response_format": FORMAT},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": r"[a-f]{3,9}( [0-9]{2}){1,3}"}},
    {"guided_choice": ["left", "leftmost", "right"]},
    {"tools": [TOOL]},
    {"tools": [STRICT]},
    {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "judge"}}},
    {"tools": [TOOL], "response_format": FORMAT},
]


def random_shaping(draws: random.Random) -> dict[str, Any]:
    """The fields that every route has, each there by a coin; greedy or seeded."""
    letters = [ids(letter)[0] for letter in "abcdefgh "]
    offered: dict[str, Any] = {
        "frequency_penalty": draws.choice([-1.5, 0.5, 2]),
        "presence_penalty": draws.choice([-2, 1, 2]),
        "repetition_penalty": draws.choice([0.7, 1.2, 3.0]),
        "logit_bias": {str(token): draws.uniform(-60, 60) for token in draws.sample(letters, 4)},
        "allowed_token_ids": draws.sample(range(2, MODEL.vocab_size - 3), 150),
        "bad_words": draws.sample(["a", "th", "hello", " 1", "stop"], 2),
        "min_tokens": draws.randint(1, 20),
        "stop": [draws.choice("xyz!")],
        "include_stop_str_in_output": True,
        "top_k": draws.randint(2, 40),
        "top_p": draws.uniform(0.3, 1),
        "min_p": 0.05,
        "stop_token_ids": [draws.randint(2, 200)],
        "ignore_eos": True,
    }
    fields = {name: value for name, value in offered.items() if draws.random() < 0.3}
    sampled = {"temperature": draws.choice([0.7, 1.5]), "seed": draws.getrandbits(32)}
    return fields | (sampled if draws.random() < 0.6 else {"temperature": 0})


def random_fields(draws: random.Random) -> dict[str, Any]:
    """A chat's fields, with one form or none."""
    fields = random_shaping(draws)
    if draws.random() < 0.3:
        fields["prediction"] = {
            "type": "content",
            "content": draws.choice(["hello world", '{"ok": true}', "abc 12 34"]),
        }
    if draws.random() < 0.3:
        fields["n"] = 2
    if draws.random() < 0.5:
        fields |= {"logprobs": True, "top_logprobs": draws.randint(0, 3)}
    return fields | draws.choice(FORMS)


@pytest.mark.covers(72, 157)
async def test_random_field_combinations_give_one_answer_with_and_without_drafts() -> None:
    """Side by side, so that each answer's neighbours in the batch differ from depth to depth, too."""
    draws = random.Random(21)
    bodies = [random_fields(draws) for _ in range(24)]
    assert {name for body in bodies for name in body} >= {"response_format", "tools", "logprobs", "min_tokens", "stop"}
    async with served(told_in_few_words("hermes"), max_model_len=256) as (client, coordinator):

        async def all_of(depth: int) -> list[Any]:
            return await asyncio.gather(*(answered(client, depth=depth, stream=depth == 3, **body) for body in bodies))

        plain = await all_of(0)
        assert coordinator.accepted > 0, "a prediction is a source of drafts at any depth"
        assert await all_of(3) == plain
        assert await all_of(1) == plain
    assert sum(answer != ["no_token_left"] for answer in plain) > len(bodies) // 2
    assert len({repr(answer) for answer in plain}) > len(bodies) // 2


@pytest.mark.covers(72)
async def test_a_json_schema_holds_in_chat_streamed_and_whole_at_every_depth() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA, "strict": True}}
    async with served() as (client, _):
        for sampling in ({"temperature": 0}, {"temperature": 1.2, "seed": 5}):
            answers = [
                await answered(client, depth=depth, stream=stream, max_tokens=180, response_format=wanted, **sampling)
                for depth in (0, 1, 3)
                for stream in (False, True)
            ]
            assert all(answer == answers[0] for answer in answers)
            ((text, _, _, finish, _),) = answers[0]
            assert finish == "stop", text
            validate(json.loads(text), SCHEMA)
