"""Tool calls come out the same however a text is cut; what is no call is content, and nothing is lost or doubled."""

from __future__ import annotations

import json
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.tools.dialects import DEEPSEEK, HERMES, Dialect
from services.gateway.tools.parser import Said, ToolParser

NAMES = frozenset({"f", "get_weather"})
Calls = list[tuple[str, str]]


def read(dialect: Dialect, pieces: list[str], *, one_call: bool = False) -> tuple[str, Calls]:
    """Content and calls as a client puts them together; checks the order in which their parts come."""
    parser = ToolParser(dialect, NAMES, key="r", one_call=one_call)
    said = [*map(parser.push, pieces), parser.finish()]
    calls: list[list[str]] = []
    for part in (part for one in said for part in one.calls):
        if part.id is not None:
            assert part.index == len(calls)
            assert part.name is not None
            calls.append([part.name, part.arguments])
        else:
            assert part.index == len(calls) - 1, "arguments belong to the latest call"
            calls[-1][1] += part.arguments
    return "".join(one.content for one in said), [(name, arguments) for name, arguments in calls]


def by_characters(dialect: Dialect, text: str) -> tuple[str, Calls]:
    return read(dialect, list(text))


W = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
F = '{"name": "f", "arguments": {"a": [1, {"b": "}</tool_call>"}]}}'
A = '{"a": [1, {"b": "}</tool_call>"}]}'
OSLO = '{"city": "Oslo"}'
CASES: list[tuple[Dialect, str, str, Calls]] = [
    (HERMES, "plain words, a < b, <tool", "plain words, a < b, <tool", []),
    (HERMES, f"<tool_call>\n{W}\n</tool_call>", "", [("get_weather", OSLO)]),
    (
        HERMES,
        f"Look:\n<tool_call>{W}</tool_call>\n<tool_call>{F}</tool_call>\n",
        "Look:\n",
        [("get_weather", OSLO), ("f", A)],
    ),
    (HERMES, f"<tool_call>[{W}, {F}]</tool_call>", "", [("get_weather", OSLO), ("f", A)]),
    (HERMES, f"<tool_call>{W}", "", [("get_weather", OSLO)]),  # the end of text instead of the tag
    (HERMES, f"<tool_call>{W}</tool_call> then words", " then words", [("get_weather", OSLO)]),
    (HERMES, '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [("f", '{"x": 1}')]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    # no calls: an unknown name, no JSON, arguments that are no object, an end before the head
    (
        HERMES,
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        [],
    ),
    (HERMES, "a <tool_call>oops</tool_call> b", "a <tool_call>oops</tool_call> b", []),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        [],
    ),
    (HERMES, '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
    (HERMES, "stray</tool_call>", "stray</tool_call>", []),
    # broken after the head: the arguments as they are
    (HERMES, '<tool_call>{"name": "f", "arguments": {"x": oops}}</tool_call> z', " z", [("f", '{"x": oops}}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"x": 1', "", [("f", '{"x": 1')]),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"x": "é \\" \\\\"}}</tool_call>',
        "",
        [("f", '{"x": "é \\" \\\\"}')],
    ),
    (
        DEEPSEEK,
        "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{OSLO}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{{}}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "Hm.",
        [("get_weather", OSLO), ("f", "{}")],
    ),
    (
        DEEPSEEK,
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{OSLO}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [("get_weather", OSLO)],
    ),
    (
        DEEPSEEK,
        "<｜tool▁call▁begin｜>nobody<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>nobody<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        [],
    ),
]


@pytest.mark.parametrize(("dialect", "text", "content", "calls"), CASES)
def test_each_text_means_the_same_in_every_cutting(dialect: Dialect, text: str, content: str, calls: Calls) -> None:
    expected = (content, calls)
    assert read(dialect, [text]) == expected
    assert by_characters(dialect, text) == expected
    for place in range(len(text) + 1):
        assert read(dialect, [text[:place], text[place:]]) == expected, place
    for first, second in combinations(range(0, len(text) + 1, 3), 2):
        assert read(dialect, [text[:first], text[first:second], text[second:]]) == expected, (first, second)


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        W,
        F,
        "[",
        "]",
        ", ",
        " ",
        "\n",
        "words",
        "<",
        '{"name": "f", "arguments": ',
        "{",
        "}",
        '"',
        "\\",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "f<｜tool▁sep｜>",
        "{}",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ]
)


@settings(max_examples=150)
@given(st.lists(FRAGMENTS, max_size=9), st.sampled_from([HERMES, DEEPSEEK]), st.lists(st.integers(0, 200), max_size=6))
def test_any_text_is_read_the_same_in_any_cutting(fragments: list[str], dialect: Dialect, cuts: list[int]) -> None:
    text = "".join(fragments)
    places = sorted({0, len(text), *(place for place in cuts if place < len(text))})
    pieces = [text[first:last] for first, last in pairwise(places)]
    assert read(dialect, pieces) == read(dialect, [text]) == by_characters(dialect, text)


def test_arguments_come_as_they_are_written_not_at_the_end() -> None:
    parser = ToolParser(HERMES, NAMES, key="r")
    assert parser.push('<tool_call>{"name": "f", "argum') == Said()
    opened = parser.push('ents": {"x"')
    assert [(part.name, part.arguments) for part in opened.calls] == [("f", '{"x"')]
    assert [part.arguments for part in parser.push(": 1").calls] == [": 1"]


def test_one_piece_may_end_a_call_and_hold_another() -> None:
    parser = ToolParser(HERMES, NAMES, key="r")
    parser.push('<tool_call>{"name": "f", "arguments": {"x": ')
    said = parser.push(f"1}}}}</tool_call><tool_call>{W}</tool_call>")
    assert [(part.index, part.name, part.arguments) for part in said.calls] == [
        (0, None, "1}"),
        (1, "get_weather", OSLO),
    ]


def test_ids_are_the_same_each_time_and_differ_between_calls_and_requests() -> None:
    def identities(key: str) -> list[str | None]:
        said = ToolParser(HERMES, NAMES, key=key).push(f"<tool_call>[{W}, {F}]</tool_call>")
        return [part.id for part in said.calls]

    assert identities("r") == identities("r")
    assert len({*identities("r"), *identities("s")}) == 4


def test_without_parallel_calls_only_the_first_is_given() -> None:
    assert read(HERMES, [f"<tool_call>[{W}, {F}]</tool_call>"], one_call=True) == ("", [("get_weather", OSLO)])


@pytest.mark.parametrize("dialect", [HERMES, DEEPSEEK])
def test_what_a_dialect_writes_it_reads(dialect: Dialect) -> None:
    calls = [("f", '{"a": 1}'), ("get_weather", OSLO)]
    assert read(dialect, [dialect.write_calls(calls)]) == ("", calls)
    assert json.dumps({"a": 1}) in dialect.describe([{"a": 1}])
