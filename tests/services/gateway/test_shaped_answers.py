"""From the HTTP body to the committed text, on a small made-up model: shaped answers are the same without drafts."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import pytest
from jsonschema import validate

from tests.services.gateway.real_engine import served
from tests.services.gateway.world import CHAT, MESSAGES, events, ids
from tests.unit.engine.test_structured_text import MODEL

# Short enough to end within its budget whatever white space a made-up model puts between the parts.
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


async def answered(client: httpx.AsyncClient, *, depth: int, stream: bool = False, **fields: Any) -> tuple[str, str]:
    """The text of an answer and how it ended."""
    body = {"messages": MESSAGES, "max_tokens": 48, "speculation": {"max_depth": depth}, "stream": stream, **fields}
    answer = await client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    if not stream:
        (choice,) = answer.json()["choices"]
        return choice["message"]["content"], choice["finish_reason"]
    choices = [choice for _, data in events(answer.text) if data != "[DONE]" for choice in data["choices"]]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    return text, choices[-1]["finish_reason"]


def random_fields(draws: random.Random) -> dict[str, Any]:
    """A body's fields, each there by a coin; greedy or seeded."""
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
        "top_k": draws.randint(2, 40),
        "min_p": 0.05,
        "stop_token_ids": [draws.randint(2, 200)],
    }
    fields = {name: value for name, value in offered.items() if draws.random() < 0.4}
    sampled = {"temperature": draws.choice([0.7, 1.5]), "seed": draws.getrandbits(32)}
    return fields | (sampled if draws.random() < 0.6 else {"temperature": 0})


@pytest.mark.covers(72, 157)
async def test_random_field_combinations_give_one_text_with_and_without_drafts() -> None:
    draws = random.Random(21)
    bodies = [random_fields(draws) for _ in range(12)]
    async with served() as (client, coordinator):
        plain = [await answered(client, depth=0, **body) for body in bodies]
        assert coordinator.accepted == 0
        for depth in (1, 3):
            assert [await answered(client, depth=depth, stream=depth == 3, **body) for body in bodies] == plain
        assert coordinator.accepted > 10
    assert len(set(plain)) > len(bodies) // 2


@pytest.mark.covers(72)
async def test_a_json_schema_holds_in_chat_streamed_and_whole_at_every_depth() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA, "strict": True}}
    async with served() as (client, _):
        for sampling in ({"temperature": 0}, {"temperature": 1.2, "seed": 5}):
            texts = {
                await answered(client, depth=depth, stream=stream, max_tokens=180, response_format=wanted, **sampling)
                for depth in (0, 1, 3)
                for stream in (False, True)
            }
            ((text, finish),) = texts
            assert finish == "stop", text
            validate(json.loads(text), SCHEMA)
