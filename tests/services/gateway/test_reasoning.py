"""A thought before the answer is told apart from it, in any cutting into rows, and a constraint begins after it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers import AddedToken

from seqmtp_serve.speculation.grammar import GrammarCompiler
from services.gateway.answer_grammar import answer_grammar
from services.gateway.chat_template import ChatTemplate
from services.gateway.reasoning import CLOSE, OPEN, Thought, begin_after
from services.gateway.structured_fields import Grammar, json_grammar
from services.gateway.text_model import TextModel
from services.gateway.tools.dialects import HERMES
from services.gateway.tools.fields import NO_TOOLS
from services.gateway.tools.tool_text import special_tags
from services.settings import Settings
from tests.services.byte_tokenizer import EOS, byte_tokenizer
from tests.services.gateway.tools.test_tool_calls import TOOLS, put_together, rows
from tests.services.gateway.world import (
    CHAT,
    EOS_ID,
    MESSAGES,
    TEMPLATE,
    TEXT,
    TOKENIZER,
    fake,
    http,
    ids,
    streamed,
    strictly,
)

# As DeepSeek-V3.1's: the template opens the thought, or closes it at once.
SWITCHED = TEMPLATE + "{% if thinking %}<think>\n{% elif thinking is defined %}</think>{% endif %}"
THOUGHT, ANSWER = "Is 2 < 3? </thin no. <tool_call>", "Yes </think> it is."
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def thinking(template: str = SWITCHED) -> TextModel:
    return replace(TEXT, template=ChatTemplate(template))


def told(deltas: list[dict[str, Any]]) -> tuple[str, str]:
    """Thought and answer as a client puts them together."""
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert reasoning == "".join(delta.get("reasoning", "") for delta in deltas)
    return reasoning, "".join(delta.get("content") or "" for delta in deltas)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 200])
@pytest.mark.parametrize("opened", [True, False], ids=["by the template", "by the model"])
async def test_thought_and_answer_are_told_apart_in_any_cutting(opened: bool, size: int) -> None:
    text = f"{'' if opened else OPEN}{THOUGHT}{CLOSE}\n\n{ANSWER}"
    fields: dict[str, Any] = {"chat_template_kwargs": {"thinking": True}} if opened else {}
    async with http(fake(rows(text, size)), text=thinking()) as client:
        whole = await client.post(CHAT, json={"messages": MESSAGES, **fields})
        found = await streamed(client, stream_options={"include_usage": True}, **fields)
    strictly(ChatCompletion, whole.text)
    message = whole.json()["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == (THOUGHT, THOUGHT, ANSWER)
    chunks = [data for _, data in found if data != "[DONE]"]
    for chunk in chunks:
        strictly(ChatCompletionChunk, json.dumps(chunk))
    assert told([choice["delta"] for chunk in chunks for choice in chunk["choices"]]) == (THOUGHT, ANSWER)
    num_thought = len(ids(text.partition(CLOSE)[0] + CLOSE)) - (0 if opened else len(ids(OPEN)) - 1)
    for usage in (whole.json()["usage"], chunks[-1]["usage"]):
        assert usage["completion_tokens_details"]["reasoning_tokens"] == num_thought < usage["completion_tokens"]


async def test_a_thought_that_has_no_end_and_an_answer_without_thought() -> None:
    open_ended = {"chat_template_kwargs": {"thinking": True}}
    async with http(fake(rows(THOUGHT + "</thi", 4)), text=thinking()) as client:
        message = (await client.post(CHAT, json={"messages": MESSAGES, **open_ended})).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (THOUGHT + "</thi", "")
    for fields in ({}, {"chat_template_kwargs": {"thinking": False}}):
        async with http(fake(rows(ANSWER, 4)), text=thinking()) as client:
            answer = (await client.post(CHAT, json={"messages": MESSAGES, **fields})).json()
        message = answer["choices"][0]["message"]
        assert ("reasoning" in message, message["content"]) == (False, ANSWER)
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


async def test_a_call_follows_the_thought_and_none_is_in_it() -> None:
    text = f"{THOUGHT}{CLOSE}\n\n{CALL}"
    fields: dict[str, Any] = {"tools": TOOLS, "chat_template_kwargs": {"thinking": True}}
    for size in (1, 4, 200):
        async with http(fake(rows(text, size)), text=thinking()) as client:
            deltas = [data["choices"][0]["delta"] for _, data in (await streamed(client, **fields))[:-1]]
        assert told(deltas) == (THOUGHT, "")
        assert put_together(deltas)[1] == [("f", '{"a": 1}')]


async def test_a_resumed_stream_goes_on_inside_the_thought() -> None:
    text = f"{OPEN}{THOUGHT}{CLOSE}\n{ANSWER}"
    async with http(fake(rows(text, 3)), text=thinking()) as client:
        found = await streamed(client)
        job = found[0][1]["id"]
        for place, (event_id, _) in enumerate(found[:-1]):
            rest = await client.get(f"{CHAT}/{job}", headers={"Last-Event-ID": event_id or ""})
            again = [line[6:] for line in rest.text.split("\n") if line.startswith("data: ")]
            assert [json.loads(line) for line in again[:-1]] == [data for _, data in found[place + 1 : -1]]


async def test_the_option_and_the_template_say_whether_thoughts_are_told_apart() -> None:
    text = f"{OPEN}{THOUGHT}{CLOSE}{ANSWER}"
    off = Settings.model_validate({"gateway": {"reasoning_parser": "none"}})
    forced = Settings.model_validate({"gateway": {"reasoning_parser": "deepseek_r1"}})
    for settings, model, apart in ((off, thinking(), False), (None, TEXT, False), (forced, TEXT, True)):
        async with http(fake(rows(text, 4)), settings, text=model) as client:
            message = (await client.post(CHAT, json={"messages": MESSAGES})).json()["choices"][0]["message"]
        assert message["content"] == (ANSWER if apart else text)


@pytest.mark.parametrize("is_special", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("begin", [Thought.THINKING, Thought.MAYBE, Thought.ANSWERING])
def test_a_constraint_begins_after_the_thought(begin: Thought, is_special: bool) -> None:
    tokenizer = byte_tokenizer()
    if is_special:
        tokenizer.add_special_tokens([AddedToken(tag, special=True) for tag in (OPEN, CLOSE)])
    end = tokenizer.token_to_id(EOS)
    special = special_tags((OPEN, CLOSE), tokenizer)
    wanted = Grammar(param="response_format", text=json_grammar({"type": "object", "maxProperties": 0}))
    grammar = answer_grammar(wanted, NO_TOOLS, HERMES, special, begin)
    assert grammar is not None
    compiler = GrammarCompiler(lambda: tokenizer, tokenizer.get_vocab_size())

    def taken(text: str) -> bool:
        matcher, tokens = compiler.compile(grammar.text, (end,)), tokenizer.encode(text).ids
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    thought = f"hm {{ < ok{CLOSE}"
    assert taken("{}") == (begin is not Thought.THINKING)
    assert begin is Thought.THINKING or taken(f"{OPEN}{thought}{{}}") == (begin is Thought.MAYBE)
    for gap in ("", "\n\n"):
        assert taken(f"{thought}{gap}{{}}") == (begin is Thought.THINKING)
    assert not taken(f"{thought}hm")
    assert not taken("hm")


def test_where_an_output_begins() -> None:
    ends = {"<think>\n": Thought.THINKING, "<think></think>": Thought.ANSWERING, "hi": Thought.MAYBE}
    assert {text: begin_after(ids(text), TOKENIZER) for text in ends} == ends
    assert EOS_ID not in ids("hi")
