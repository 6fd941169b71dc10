"""Tool calls as a grammar in llguidance's Lark: what a model may write when it must call, or when calls must be right.

The rules are the dialect's own writing of a call (`Dialect.head_of`), with each function's schema for its arguments, so
that `parser.py` reads exactly what they let through. Tags that are single special tokens are named by their ids; other
tags are text, and free text before them ends at the first (a lazy lexeme, as in llguidance's own `StructTag`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from services.gateway.structured_fields import WHITESPACE
from services.gateway.tools.dialects import Dialect
from services.gateway.tools.fields import ToolUse

ANY_ARGUMENTS = {"type": "object"}


def call_rules(use: ToolUse, dialect: Dialect, special: Mapping[str, int], *, answers: bool = False) -> str:
    """Rules with `body` for the whole answer. `special` are the ids of tags that are special tokens.

    `answers`: where calls are not forced, the only other answer is what the rule `answer` takes; else it is free text,
    the terminal `TEXT`. Both are the caller's to define.
    """
    before, after = dialect.around or ("", "")
    rules = [
        *_entries(use, dialect, special),
        "call: opening entry close",
        f"opening: {_terms(dialect.open, special)}",
        f"close: {_terms(dialect.end + dialect.close, special)}",
        f"before: {_terms(before, special)}",
        f"between: {_terms(dialect.between, special)}",
        f"after: {_terms(after, special)}",
        "calls: before call after" if use.one_call else "calls: before call (between call)* after",
    ]
    if use.forced:
        return "\n".join([*rules, "body: calls"])
    if answers:
        return "\n".join([*rules, "body: answer | calls"])
    return "\n".join([*rules, *_text_and_calls(use, dialect, special)])


def _text_and_calls(use: ToolUse, dialect: Dialect, special: Mapping[str, int]) -> list[str]:
    """Free text that ends where a call begins. Tags around all calls may stand in it, unless they are tokens."""
    tag = re.escape(dialect.open).replace("/", r"\/")
    quiet = rf"QUIET: /(.|\n)*/ & ~/(.|\n)*{tag}(.|\n)*/"
    if dialect.open in special:
        return [quiet, "body: QUIET calls?" if use.one_call else "body: (QUIET calls)* QUIET"]
    begun = [f"begun[lazy]: TEXT {_terms(dialect.open, special)}", "inner: begun entry close"]
    return [*begun, quiet, "body: inner? QUIET"] if use.one_call else [*begun, "body: inner* TEXT"]


def _entries(use: ToolUse, dialect: Dialect, special: Mapping[str, int]) -> list[str]:
    """`entry`: a function's name and its arguments, after the opening tag."""
    rules, entries = [], []
    for place, (name, schema) in enumerate(use.functions.items()):
        arguments = schema if use.forced or name in use.strict else ANY_ARGUMENTS
        head = _terms(dialect.head_of(name).removeprefix(dialect.open), special)
        entries.append(f"{head} arguments_{place}")
        written = json.dumps(arguments | {"x-guidance": {"whitespace_pattern": WHITESPACE}})
        rules.append(f"arguments_{place}: %json {written}")
    return [f"entry: {' | '.join(entries)}", *rules]


def _terms(text: str, special: Mapping[str, int]) -> str:
    """A text as Lark has it."""
    if not special:
        return json.dumps(text, ensure_ascii=False)
    tags = "|".join(map(re.escape, special))
    parts = [part for part in re.split(f"({tags})", text) if part]
    return (
        " ".join(f"<[{special[part]}]>" if part in special else json.dumps(part, ensure_ascii=False) for part in parts)
        or '""'
    )
