"""A conversation about tools as the model's chat template takes it, or in words where the template has none for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from services.gateway.tools.dialects import Dialect, Tool

Turn = dict[str, Any]


def put_to_template(
    turns: Sequence[Turn], tools: Sequence[Tool], dialect: Dialect, *, knows_tools: bool, knows_calls: bool
) -> list[Turn]:
    """The turns to render. `knows_tools`: the template takes `tools`; `knows_calls`: it writes past calls itself."""
    found = [_with_calls(turn, dialect) if knows_calls else _in_words(turn, dialect) for turn in turns]
    if not tools or knows_tools:
        return found
    described = dialect.describe(tools)
    if found and found[0]["role"] == "system":
        return [{**found[0], "content": f"{found[0]['content']}\n\n{described}"}, *found[1:]]
    return [{"role": "system", "content": described}, *found]


def _with_calls(turn: Turn, dialect: Dialect) -> Turn:
    """Templates take arguments as objects, but for those that write them into a text themselves."""
    if not turn.get("calls"):
        return {name: value for name, value in turn.items() if name != "calls"}
    written = [
        {
            "type": "function",
            "id": identity,
            "function": {"name": name, "arguments": text if dialect.arguments_are_text else json.loads(text)},
        }
        for identity, name, text in turn["calls"]
    ]
    return {"role": turn["role"], "content": turn["content"], "tool_calls": written}


def _in_words(turn: Turn, dialect: Dialect) -> Turn:
    if turn.get("calls"):
        calls = dialect.write_calls([(name, text) for _, name, text in turn["calls"]])
        content = f"{turn['content']}\n{calls}" if turn["content"] else calls
        return {"role": turn["role"], "content": content}
    if turn["role"] == "tool":
        return {"role": "tool", "content": dialect.write_result(turn["content"])}
    return {name: value for name, value in turn.items() if name != "calls"}
