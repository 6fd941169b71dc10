"""Bad bodies: always 400, always naming the field; nothing that would change the answer is passed over in silence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.gateway.refused import IDLE, REFUSED
from tests.services.gateway.world import CHAT, MESSAGES, fake, http, ids

COMPLETIONS = "/v1/completions"

# What each refused field looks like when it does ask for something.
ASKING: dict[str, Any] = {
    "length_penalty": 0.5,
    "use_beam_search": True,
    "best_of": 4,
    "logits_processors": ["x"],
    "thinking_token_budget": 5,
    "include_reasoning": False,
    "separate_reasoning": False,
    "min_new_tokens": 3,
    "typical_p": 0.5,
    "tfs_z": 0.5,
    "top_a": 0.5,
    "mirostat": 2,
    "dry_multiplier": 0.8,
    "xtc_probability": 0.1,
    "dynatemp_range": 0.5,
    "watermark": True,
    "custom_logit_processor": "x",
    "vllm_xargs": {"a": 1},
    "lora_path": "x",
    "reasoning": {"effort": "low"},
    "reasoning_effort": "high",
    "verbosity": "low",
    "guided_decoding_backend": "x",
    "guided_whitespace_pattern": " ",
    "structural_tag": {},
    "regex": "a",
    "ebnf": "root ::= 'a'",
    "grammar": "start: 'a'",
    "json_schema": {},
    "stop_regex": "a",
    "tools": 2 * [{"type": "function", "function": {"name": "f"}}],  # chat has them, but no two of one name
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "prediction": {"type": "content", "content": "x"},
    "modalities": ["text", "audio"],
    "audio": {"voice": "x"},
    "web_search_options": {},
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"thinking": True},
    "add_generation_prompt": False,
    "continue_final_message": True,
    "documents": [{"text": "x"}],
    "truncate_prompt_tokens": 5,
    "prompt_embeds": "x",
    "suffix": "x",
    "add_special_tokens": True,
    "mm_processor_kwargs": {"a": 1},
    "top_logprobs": 5,
    "prompt_logprobs": 0,
    "echo": True,
    "skip_special_tokens": False,
    "return_tokens_as_token_ids": True,
    "return_token_ids": True,
    "stream_interval": 2,
    "max_new_tokens": 5,
    "n_predict": 5,
    "max_output_tokens": 5,
    "stop_sequences": ["x"],
    "no_stop_trim": True,
    "repeat_penalty": 1.1,
    "thinking": {"type": "enabled"},
    "enable_thinking": False,
    "messages": MESSAGES,
    "prompt": "x",
    "input": "x",
    "instructions": "x",
    "previous_response_id": "x",
    "conversation": "x",
    "context_management": [{"type": "compaction"}],
    "truncation": "auto",
    "max_tool_calls": 1,
    "text": {"format": {"type": "json_object"}},
    "include": ["message.output_text.logprobs"],
    "system": "x",
    "cache_salt": "x",
}

SUPPORTED_BY = {
    CHAT: {"messages", "top_logprobs", "prediction", "chat_template_kwargs"},
    COMPLETIONS: {"prompt", "echo", "prompt_logprobs", "add_special_tokens"},
}

BAD: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"n": 2.0}, "n"),
    ({"n": 129}, "n"),
    ({"seed": "1"}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"temperature": 2.01}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": "0.5"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.0}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.0}, "max_tokens"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a", 3]}, "stop[1]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"stop_token_ids": 3}, "stop_token_ids"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"frequency_penalty": 2.1}, "frequency_penalty"),
    ({"frequency_penalty": False}, "frequency_penalty"),
    ({"presence_penalty": -2.1}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": True}, "repetition_penalty"),
    ({"logit_bias": {"the": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"²": 1}}, "logit_bias"),
    ({"logit_bias": {"1000000": 1}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
    ({"allowed_token_ids": ["5"]}, "allowed_token_ids[0]"),
    ({"allowed_token_ids": [ids("a")[0]], "bad_words": ["a"]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": ["a", "  "]}, "bad_words[1]"),
    ({"bad_words": "a"}, "bad_words"),
    ({"speculation": {"max_depth": -1}}, "speculation.max_depth"),
    ({"speculation": {"max_depth": True}}, "speculation.max_depth"),
    ({"speculation": {"depth": 3}}, "speculation.depth"),
    ({"model": 3}, "model"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"priority": "high"}, "priority"),
    ({"store": 1}, "store"),
    ({"logprobs": 1}, "logprobs"),
    ({"prediction": "x"}, "prediction"),
    ({"prediction": {"type": "content"}}, "prediction.content"),
    ({"prediction": {"type": "audio", "content": "x"}}, "prediction.type"),
    ({"prediction": {"type": "content", "content": [{"type": "image_url"}]}}, "prediction.content"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 1.0}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"metadata": []}, "metadata"),
]


def test_every_refused_field_has_an_example() -> None:
    assert set(ASKING) == set(REFUSED)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
async def test_fields_that_would_change_the_answer_are_refused_by_name(path: str, stream: bool) -> None:
    coordinator = fake()
    base = {"stream": stream, **({"messages": MESSAGES} if path == CHAT else {"prompt": "a"})}
    async with http(coordinator) as client:
        for name, value in ASKING.items():
            if name in SUPPORTED_BY[path]:
                continue
            answer = await client.post(path, json={**base, name: value})
            assert answer.status_code == 400, name
            assert answer.json()["error"]["param"] == name
            assert answer.json()["error"]["type"] == "invalid_request_error"
    assert coordinator.requests == []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_same_fields_pass_when_they_ask_for_nothing(path: str) -> None:
    base = {"messages": MESSAGES} if path == CHAT else {"prompt": "a"}
    async with http() as client:
        nothing = {**dict.fromkeys(REFUSED.keys() - base), **dict.fromkeys(IDLE, True)}
        assert (await client.post(path, json={**base, **nothing})).status_code == 200
        for name, neutrals in REFUSED.items():
            for neutral in neutrals:
                assert (await client.post(path, json={**base, name: neutral})).status_code == 200, name


async def test_false_is_not_zero_and_true_is_not_one() -> None:
    async with http() as client:
        for name, value in (("best_of", True), ("use_beam_search", 0), ("echo", 0)):
            answer = await client.post(CHAT, json={"messages": MESSAGES, name: value})
            assert answer.json()["error"]["param"] == name


@pytest.mark.parametrize(("fields", "param"), BAD)
async def test_a_bad_value_is_400_and_names_its_field(fields: dict[str, Any], param: str) -> None:
    async with http() as client:
        answer = await client.post(CHAT, json={"messages": MESSAGES, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (MESSAGES * 4097, "messages"),
        ("hi", "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [*MESSAGES, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[1].content[0].type",
        ),
        ([{"role": "function", "content": "x", "name": "f"}], "messages[0].role"),
        ([*MESSAGES, {"role": "assistant", "content": "x", "prefix": True}], "messages[1].prefix"),
        (
            [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
            "messages[0].tool_calls",
        ),
        ([{"role": "assistant", "content": None, "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "assistant", "content": "", "function_call": {"name": "f"}}], "messages[0].function_call"),
    ],
)
async def test_a_bad_message_is_400_and_names_its_place(messages: Any, param: str) -> None:
    async with http() as client:
        answer = await client.post(CHAT, json={"messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        (["a", 3], "prompt[1]"),
        ([3, "a"], "prompt[1]"),
        ([True], "prompt[0]"),
        ([-1], "prompt[0]"),
        ([10**6], "prompt"),
        ({"a": 1}, "prompt"),
        (None, "prompt"),
        (["a"] * 129, "prompt"),
    ],
)
async def test_a_bad_prompt_is_400(prompt: Any, param: str) -> None:
    async with http() as client:
        answer = await client.post(COMPLETIONS, json={"prompt": prompt})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b'{"messages": NaN}', b"[" * 100_000, b"null"],
)
async def test_a_body_that_is_no_object_is_400(body: bytes) -> None:
    async with http() as client:
        answer = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_numbers_that_are_none_are_refused(number: str) -> None:
    body = json.dumps({"messages": MESSAGES, "temperature": 0.25}).replace("0.25", number)
    async with http() as client:
        answer = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "temperature"


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"properties": {name: {}}}}}


async def test_half_a_surrogate_pair_is_no_text() -> None:
    half = "a\ud800b"
    bad = [
        ({"messages": [{"role": "user", "content": half}]}, "messages[0].content"),
        ({"messages": MESSAGES, "stop": ["x", half]}, "stop[1]"),
        ({"messages": MESSAGES, "model": half}, "model"),
        ({"messages": MESSAGES, "speculation": {half: 1}}, "speculation"),
        ({"messages": MESSAGES, "metadata": {"a": half}}, "metadata"),
        ({"messages": MESSAGES, "metadata": {half: "a"}}, "metadata"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"a": [half]}}, "chat_template_kwargs"),
        ({"messages": MESSAGES, "guided_json": {"enum": [half]}}, "guided_json"),
        ({"messages": MESSAGES, "tools": [tool(half)]}, "tools[0].function.parameters"),
    ]
    async with http() as client:
        for body, param in bad:
            raw = json.dumps(body)
            answer = await client.post(CHAT, content=raw, headers={"content-type": "application/json"})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param


async def test_an_error_never_echoes_much_of_its_request() -> None:
    huge = "x" * 200_000
    bad = [
        {"messages": MESSAGES, "stop": [huge]},
        {"messages": MESSAGES, "model": huge},
        {"messages": [{"role": huge, "content": "x"}]},
        {"messages": MESSAGES, "stream": huge},
        {"messages": [{"role": "user", "content": [{"type": huge}]}]},
        {"messages": MESSAGES, "speculation": {huge: 1}},
    ]
    async with http() as client:
        for body in bad:
            answer = await client.post(CHAT, json=body)
            assert answer.status_code in (400, 404)
            assert len(answer.content) < 3000


async def test_context_overflow_has_the_phrase_clients_look_for() -> None:
    long = "a" * 2048
    cases = [
        (CHAT, {"messages": [{"role": "user", "content": long}]}, "messages"),
        (COMPLETIONS, {"prompt": long}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 2048}, "max_tokens"),
        (CHAT, {"messages": MESSAGES, "max_completion_tokens": 2048}, "max_completion_tokens"),
    ]
    async with http() as client:
        for path, body, param in cases:
            for stream in (False, True):
                answer = await client.post(path, json={**body, "stream": stream})
                assert answer.status_code == 400
                error = answer.json()["error"]
                assert error["code"] == "context_length_exceeded"
                assert error["param"] == param
                assert "This model's maximum context length is 2048 tokens" in error["message"]
        fits = await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2047})
        assert fits.status_code == 200


@pytest.mark.parametrize(
    "prompt",
    ["a" * 2048, ["a", "a" * 2048], [10**9] * 2048, [[1], [10**9] * 2048]],
    ids=["text", "texts", "ids", "lists of ids"],
)
async def test_a_prompt_that_does_not_fit_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch, prompt: Any
) -> None:
    """No digest of the body is taken, and no token is looked up: those here are in no vocabulary."""
    written = list[object]()

    def digest(*body: object) -> str:
        written.append(body)
        return ""

    monkeypatch.setattr("services.gateway.gateway.digest_of", digest)
    async with http() as client:
        answer = await client.post(COMPLETIONS, json={"prompt": prompt})
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert not written
        assert (await client.post(COMPLETIONS, json={"prompt": "a"})).status_code == 200
        assert len(written) == 1


async def test_a_body_without_its_content_type_is_told_what_to_send() -> None:
    async with http() as client:
        forgotten = await client.post(
            CHAT,
            content=json.dumps({"messages": MESSAGES}),
            headers={"content-type": "application/x-www-form-urlencoded"},  # what curl sends without -H
        )
        listed = await client.post(CHAT, json=[1])
    assert [forgotten.status_code, listed.status_code] == [400, 400]
    assert "'Content-Type: application/json'" in forgotten.json()["error"]["message"]
    assert listed.json()["error"]["message"] == "The body is JSON, but no object."
