"""A schema whose alternatives multiply is refused before it is compiled; ordinary ones cost what there is of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.gateway.schema_cost import MAX_COST, grammar_cost, schema_cost
from services.gateway.structured_fields import json_grammar
from tests.services.gateway.world import CHAT, MESSAGES, fake, http


def deep(levels: int) -> dict[str, Any]:
    """Properties beside three alternatives, within properties beside three alternatives, and so on."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "anyOf": [{"required": ["a"]}] * 3}
    return schema


MANY = {"anyOf": [{"type": "string"}] * 10}
TWICE = {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}
ALL_AT_ONCE = {"allOf": [MANY] * 5}
BY_REFERENCE = {"$defs": {"a": MANY}, "properties": {"x": {"allOf": [{"$ref": "#/$defs/a"}] * 5}}}
CHAIN = {
    "$defs": {"a": MANY, **{f"b{n}": {"anyOf": [{"$ref": f"#/$defs/b{n + 1}"}] * 2} for n in range(40)}, "b40": TWICE}
}
LARK = "start: %json " + json.dumps(deep(15))


@pytest.mark.parametrize(
    ("schema", "cost"),
    [
        (True, 1),
        ({"type": "object", "properties": {name: {"type": "string"} for name in "abc"}}, 4),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, 4),
        ({"$ref": "#"}, 1),
        ({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, 4),
        (deep(1), 9),
        (deep(2), 33),
    ],
)
def test_what_there_is_to_compile_is_counted(schema: Any, cost: int) -> None:
    assert schema_cost(schema) == cost


@pytest.mark.parametrize("schema", [deep(15), ALL_AT_ONCE, BY_REFERENCE, CHAIN | {"$ref": "#/$defs/b0"}])
def test_what_multiplies_out_is_found_at_once(schema: dict[str, Any]) -> None:
    assert schema_cost(schema) > MAX_COST
    assert grammar_cost(json_grammar(schema)) > MAX_COST


def test_ordinary_schemas_are_far_from_the_bound() -> None:
    fields = {f"field{number}": {"anyOf": [{"type": "string"}, {"type": "null"}]} for number in range(500)}
    assert schema_cost({"type": "object", "properties": fields, "required": list(fields)}) < MAX_COST / 4
    assert grammar_cost("start: /a+/") == grammar_cost("{not JSON") == grammar_cost("start: %json {") == 0
    assert grammar_cost("start: %json " + "[" * 100_000) > MAX_COST


@pytest.mark.parametrize(
    "asked",
    [
        {"guided_json": deep(15)},
        {"guided_grammar": LARK},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": deep(15)}}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": deep(15)}}], "tool_choice": "required"},
    ],
    ids=lambda asked: next(iter(asked)),
)
async def test_it_is_a_400_on_every_way_in(asked: dict[str, Any]) -> None:
    coordinator = fake()
    async with http(coordinator) as client:
        answer = await client.post(CHAT, json={"messages": MESSAGES, **asked})
    assert answer.status_code == 400
    assert "multiply out" in answer.json()["error"]["message"]
    assert coordinator.requests == []
