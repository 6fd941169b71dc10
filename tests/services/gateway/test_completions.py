"""The older route: prompts in four forms, and the same rows underneath."""

from __future__ import annotations

import json

import pytest
from openai.types import Completion
from pydantic import TypeAdapter

from tests.services.gateway.world import fake, http, ids, streamed

PATH = "/v1/completions"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [ids("ab")]),
        (["ab", "c"], [ids("ab"), ids("c")]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
async def test_every_form_of_prompt(prompt: object, expected: list[list[int]]) -> None:
    coordinator = fake()
    async with http(coordinator) as client:
        answer = await client.post(PATH, json={"prompt": prompt, "model": "fake"})
    TypeAdapter(Completion).validate_json(answer.text, strict=True)
    assert [list(request.prompt_ids) for request in coordinator.requests] == expected
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(len(expected)))
    assert all(choice["text"] == "hello world" for choice in answer.json()["choices"])
    assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_a_prompts_choice_does_not_depend_on_its_neighbours() -> None:
    coordinator = fake()
    async with http(coordinator) as client:
        await client.post(PATH, json={"prompt": ["a", "b"], "n": 2, "seed": 7})
    keyed = [(request.prompt_ids, request.choice, request.params.seed) for request in coordinator.requests]
    (a,), (b,) = ids("a"), ids("b")
    assert keyed == [((a,), 0, 7), ((a,), 1, 7), ((b,), 0, 7), ((b,), 1, 7)]


async def test_sixteen_tokens_unless_asked_otherwise() -> None:
    coordinator = fake()
    async with http(coordinator) as client:
        await client.post(PATH, json={"prompt": "a"})
        await client.post(PATH, json={"prompt": "a", "max_tokens": 99})
        await client.post(PATH, json={"prompt": "a", "max_tokens": 99, "max_completion_tokens": 4})
    assert [request.params.max_tokens for request in coordinator.requests] == [16, 99, 4]


async def test_a_stream_has_text_rows_and_a_finish_without_text() -> None:
    async with http() as client:
        found = await streamed(client, PATH, prompt="a", stream_options={"include_usage": True})
    chunks = [data for _, data in found[:-1]]
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["h", "ello", " world", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, None, None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    TypeAdapter(Completion).validate_json(json.dumps(chunks[-2]), strict=True)
    assert chunks[-1]["choices"] == []
    assert found[-1][1] == "[DONE]"


async def test_neutral_completion_fields_pass() -> None:
    fields = {"echo": False, "logprobs": None, "suffix": None, "best_of": 1, "logit_bias": {}, "presence_penalty": 0.0}
    async with http() as client:
        assert (await client.post(PATH, json={"prompt": "a", **fields})).status_code == 200
