"""Fields that constrain an answer become one grammar, compiled before anything starts, or a 400 that says why not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from seqmtp_serve.speculation.grammar import GrammarCompiler
from tests.services.gateway.world import CHAT, EOS_ID, MESSAGES, TOKENIZER, fake, http, ids

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
COMPILER = GrammarCompiler(lambda: TOKENIZER, TOKENIZER.get_vocab_size())


async def takes(text: str, path: str = CHAT, **fields: Any) -> bool:
    """Whether the grammar that reaches the coordinator for these fields is the whole of `text`."""
    coordinator = fake()
    asked = {"messages": MESSAGES} if path == CHAT else {"prompt": "a"}
    async with http(coordinator) as client:
        answer = await client.post(path, json={**asked, **fields})
    assert answer.status_code == 200, answer.text
    shaping = coordinator.requests[0].params.shaping
    assert shaping is not None
    matcher = COMPILER.compile(shaping.grammar, (EOS_ID,))
    tokens = ids(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def openai(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}


ASKED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}}, '{"b": [1, {"c": null}]}', "[1]"),
    ({"response_format": openai(SCHEMA)}, '{ "a" :-12}', '{"a": "x"}'),
    ({"response_format": openai(SCHEMA, strict=True, description="d")}, '{"a": 1}', '{"a": 1, "b": 2}'),
    ({"structured_outputs": {"json": SCHEMA}}, '{"a": 1}', "{}"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '{"a": 1}', "{}"),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, '{"a":1}', '{"a": 1}'),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "_"}}, '{_"a":1}', '{ "a":1}'),
    ({"structured_outputs": {"json_object": True}}, "{}", "1"),
    ({"structured_outputs": {"regex": "a+b"}}, "aab", "b"),
    ({"structured_outputs": {"choice": ["left", 'ri"ght', "ü|x"]}}, "ü|x", "lef"),
    ({"structured_outputs": {"grammar": 'start: "x" start | "y"'}}, "xxy", "x"),
    ({"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}}, "no", "maybe"),
    ({"guided_json": SCHEMA}, '{"a": 1}', "{}"),
    ({"guided_regex": "[0-9]{2}"}, "12", "123"),
    ({"guided_choice": ["a", "b"]}, "b", "ab"),
    ({"guided_grammar": 'start: "x"'}, "x", "y"),
]


@pytest.mark.parametrize(("fields", "good", "bad"), ASKED)
async def test_each_field_is_the_grammar_it_says(fields: dict[str, Any], good: str, bad: str) -> None:
    assert await takes(good, **fields)
    assert not await takes(bad, **fields)


async def test_completions_take_them_too() -> None:
    assert await takes("ab", "/v1/completions", guided_regex="ab")


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None, "structured_outputs": None, "guided_json": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False, "whitespace_pattern": " "}},
    ],
)
async def test_free_text_has_no_grammar(fields: dict[str, Any]) -> None:
    coordinator = fake()
    async with http(coordinator) as client:
        assert (await client.post(CHAT, json={"messages": MESSAGES, **fields})).status_code == 200
    assert coordinator.requests[0].params.shaping is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type", ""),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
        ({"response_format": openai({"type": "nope"})}, "response_format", "Invalid type: nope"),
        ({"response_format": openai({"not": {}})}, "response_format", "not"),
        ({"response_format": openai([1])}, "response_format.json_schema.schema", ""),
        ({"response_format": openai({"enum": ["\ud800"]})}, "response_format.json_schema.schema", "surrogate"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "cannot be read"),
        ({"structured_outputs": {"json": "3"}}, "structured_outputs.json", "no JSON object"),
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", ""),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", ""),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar", "unknown name"),
        ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar", "GBNF"),
        ({"guided_grammar": "root ::= ("}, "guided_grammar", "GBNF"),
        ({"guided_json": "{"}, "guided_json", "cannot be read"),
        ({"guided_regex": "x" * 70_000}, "guided_regex", "65536"),
        ({"response_format": openai({"enum": ["x" * 140_000]})}, "response_format", "characters"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "one constraint"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs.choice",
            "'structured_outputs.regex' and",
        ),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema", ""),
        (
            {"response_format": {**openai(SCHEMA), "type": "json_object"}},
            "response_format.json_schema",
            "needs the type",
        ),
        ({"response_format": {**openai(SCHEMA), "type": "text"}}, "response_format.json_schema", "needs the type"),
    ],
)
async def test_a_bad_constraint_is_a_400_before_anything_starts(
    fields: dict[str, Any], param: str, message: str, stream: bool
) -> None:
    coordinator = fake()
    body = json.dumps({"messages": MESSAGES, "stream": stream, **fields})
    async with http(coordinator) as client:
        answer = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert coordinator.requests == []
