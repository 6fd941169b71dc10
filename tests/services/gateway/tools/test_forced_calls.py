"""Calls that are asked for, and calls that have to be right: the model can write nothing else, at any depth."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from jsonschema import validate
from llguidance import LLMatcher
from openai.types.chat import ChatCompletion
from tokenizers import AddedToken

from seqmtp_serve.speculation.grammar import GrammarCompiler
from services.gateway.answer_grammar import answer_grammar
from services.gateway.chat_template import ChatTemplate
from services.gateway.structured_fields import Grammar, json_grammar
from services.gateway.text_model import TextModel
from services.gateway.tools.dialects import DEEPSEEK, DEEPSEEK_V3, HERMES, Dialect, dialect_of
from services.gateway.tools.fields import NamedTool, ToolSpec, tool_use
from services.gateway.tools.tool_text import special_tags
from tests.services.byte_tokenizer import EOS, byte_tokenizer
from tests.services.gateway.real_engine import served
from tests.services.gateway.tools.test_tool_calls import put_together
from tests.services.gateway.world import CHAT, MESSAGES, TEMPLATE, TEXT, events, http, strictly

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {"get_weather": WEATHER, "stop": {"type": "object", "maxProperties": 0}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
SOME = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
DIALECTS = {"hermes": HERMES, "deepseek": DEEPSEEK, "deepseek_v3": DEEPSEEK_V3}
# What a template has to hold for `dialect_of` to know its dialect.
MARKS = {"hermes": "", "deepseek": "{# <｜tool▁call▁begin｜> #}", "deepseek_v3": "{# <｜tool▁call▁begin｜> ```json #}"}
OSLO, TOWN = '{"city": "Oslo", "days": 2}', '{"town": "Oslo"}'


def specs(*strict: str) -> list[ToolSpec]:
    return [
        ToolSpec.model_validate(
            {**tool, "function": {**tool["function"], "strict": tool["function"]["name"] in strict}}
        )
        for tool in TOOLS
    ]


@pytest.mark.parametrize("is_special", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_the_grammar_takes_what_the_dialect_writes_and_no_other_call(dialect: Dialect, is_special: bool) -> None:
    tokenizer = byte_tokenizer()
    if is_special:
        tokenizer.add_special_tokens([AddedToken(tag, special=True) for tag in dialect.tags])
    special = special_tags(dialect.tags, tokenizer)
    assert bool(special) is is_special
    end = tokenizer.token_to_id(EOS)
    compiler = GrammarCompiler(lambda: tokenizer, tokenizer.get_vocab_size())
    one, two = (
        dialect.write_calls([("get_weather", OSLO)]),
        dialect.write_calls([("get_weather", OSLO), ("stop", "{}")]),
    )
    bad, unknown = dialect.write_calls([("get_weather", TOWN)]), dialect.write_calls([("nobody", "{}")])
    texts = {"": "", "yes": "yes", "one": one, "two": two, "after": f"So: {one}", "bad": bad, "unknown": unknown}

    def taken(choice: Any, *, parallel: bool, strict: bool = False, answer: bool = False) -> str:
        use = tool_use(specs("get_weather") if strict else specs(), choice, parallel)
        yes = Grammar(param="response_format", text=LLMatcher.grammar_from_regex("yes")) if answer else None
        grammar = answer_grammar(yes, use, dialect, special)
        assert grammar is not None
        found = []
        for name, text in texts.items():
            matcher, ids = compiler.compile(grammar.text, (end,)), tokenizer.encode(text).ids
            if matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting():
                found.append(name or "nothing")
        return " ".join(found)

    named = NamedTool.model_validate(NAMED)
    assert taken("required", parallel=True) == "one two"
    assert taken("required", parallel=False) == "one"
    assert taken(named, parallel=True) == "one"
    assert taken("auto", parallel=True, strict=True) == "nothing yes one two after"
    assert taken("auto", parallel=False, strict=True) == "nothing yes one after"
    assert taken("auto", parallel=True, answer=True) == "yes one two bad"  # not strict: arguments are any object
    assert taken("required", parallel=True, answer=True) == "one two"


def test_free_text_and_free_calls_are_not_constrained() -> None:
    grammar = Grammar(param="regex", text=json_grammar({"type": "object"}))
    assert answer_grammar(None, tool_use(specs(), "auto", None), HERMES, {}) is None
    assert answer_grammar(grammar, tool_use(None, None, None), HERMES, {}) is grammar


def test_templates_of_v3_and_v3_1_are_told_apart() -> None:
    assert [dialect_of(TEMPLATE + mark) for mark in MARKS.values()] == list(DIALECTS.values())


async def asked(client: Any, *, depth: int, stream: bool, **fields: Any) -> list[tuple[str, Any, str]]:
    """Content, calls and finish reason of each choice."""
    body = {"messages": MESSAGES, "tools": TOOLS, "speculation": {"max_depth": depth}, "stream": stream, **fields}
    answer = await client.post(CHAT, json={"max_tokens": 440, **body})
    assert answer.status_code == 200, answer.text
    if not stream:
        strictly(ChatCompletion, answer.text)
        found = []
        for choice in answer.json()["choices"]:
            calls = choice["message"].get("tool_calls", ())
            pairs = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
            found.append((choice["message"]["content"] or "", pairs, choice["finish_reason"]))
        return found
    chunks = [choice for _, data in events(answer.text) if data != "[DONE]" for choice in data["choices"]]
    by_index = [[one for one in chunks if one["index"] == index] for index in range(fields.get("n", 1))]
    return [(*put_together([one["delta"] for one in mine]), mine[-1]["finish_reason"]) for mine in by_index]


def told_in_few_words(name: str) -> TextModel:
    """A short prompt: the template says nothing of the tools it is given."""
    return replace(TEXT, template=ChatTemplate(TEMPLATE + "{% if tools %}{% endif %}" + MARKS[name]))


ASKED: list[dict[str, Any]] = [
    {"tool_choice": NAMED, "temperature": 0},
    {"tool_choice": SOME, "temperature": 1.3, "seed": 3},
    {"tool_choice": "required", "temperature": 1.1, "seed": 4},
]


@pytest.mark.covers(72)
@pytest.mark.parametrize("name", ["hermes", "deepseek_v3"])
async def test_a_forced_call_keeps_to_its_schema_and_is_the_same_at_every_depth(name: str) -> None:
    async with served(told_in_few_words(name), max_model_len=512) as (client, coordinator):

        async def round_(depth: int, *, stream: bool) -> list[Any]:
            bodies = ({"parallel_tool_calls": False, **fields} for fields in ASKED)
            return await asyncio.gather(*(asked(client, depth=depth, stream=stream, **body) for body in bodies))

        plain = await round_(0, stream=False)
        for fields, [(content, calls, finish)] in zip(ASKED, plain, strict=True):
            assert (content, finish, len(calls)) == ("", "tool_calls", 1)
            assert fields["tool_choice"] == "required" or calls[0][0] == "get_weather"
            validate(json.loads(calls[0][1]), SCHEMAS[calls[0][0]])
        assert await round_(3, stream=True) == plain
        assert coordinator.accepted > 0


async def test_forced_calls_in_several_choices_and_after_a_cut() -> None:
    async with served(told_in_few_words("hermes"), max_model_len=512) as (client, _):
        fields = {"tool_choice": NAMED, "temperature": 1.2, "seed": 8, "n": 2}
        both = await asked(client, depth=3, stream=True, **fields)
        assert [finish for *_, finish in both] == ["tool_calls"] * 2
        assert both == await asked(client, depth=0, stream=False, **fields)
        body = {"messages": MESSAGES, "tools": TOOLS, "stream": True, "max_tokens": 440, **fields, "n": 1}
        found = events((await client.post(CHAT, json=body)).text)
        place = len(found) // 2
        rest = await client.get(f"{CHAT}/{found[0][1]['id']}", headers={"Last-Event-ID": found[place][0] or ""})
        assert events(rest.text)[:-1] == found[place + 1 : -1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}, "tool_choice"),
        ({"tool_choice": {**SOME, "allowed_tools": {"mode": "auto", "tools": [{"type": "function"}]}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools[0]"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {"x": 1}}}}
                ]
            },
            "tools",
        ),
    ],
)
async def test_what_cannot_be_forced_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        async with http() as client:
            answer = await client.post(CHAT, json={"messages": MESSAGES, "tools": TOOLS, "stream": stream, **fields})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"].startswith(param)
