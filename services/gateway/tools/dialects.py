"""How models write tool calls, and how tools are described to models whose template has no word for them.

Two dialects: Hermes, JSON between `<tool_call>` tags (NousResearch's format; SmolLM2's instruct models know it,
also with a list of calls in one pair of tags), and that of DeepSeek, which V3 and V3.1 write differently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Tool = Mapping[str, Any]  # OpenAI's {"type": "function", "function": {name, description, parameters}}
Call = tuple[str, str]  # name, arguments as JSON text

_NAME = r'"(?P<name>[\w-]{1,64})"'
_ENTRY = rf'\{{\s*"name"\s*:\s*{_NAME}\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """`open` and `close` stand around a call, `around` around all of them, `separator` before arguments.

    `head` matches from after `open` to the arguments' first brace and gives the name; `more` does so for a further
    call between the same tags; `tail` is what may stand between the arguments' last brace and `close`.

    As a model is taught to write it, a call is `open`, `begin`, the name, `middle`, the arguments, `end` and `close`,
    and the next one follows after `between`.
    """

    open: str
    close: str
    around: tuple[str, ...]
    separator: str
    head: re.Pattern[str]
    more: re.Pattern[str]
    tail: re.Pattern[str]
    begin: str
    middle: str
    end: str
    between: str
    arguments_are_text: bool  # to a template that writes past calls itself
    format: str  # shown to a model whose template does not describe tools

    @property
    def tags(self) -> tuple[str, ...]:
        """Every tag: they may be single tokens that a text leaves out."""
        return tuple(filter(None, (self.open, self.close, *self.around, self.separator)))

    def describe(self, tools: Sequence[Tool]) -> str:
        """The system message's part about tools."""
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return f"You may call functions. These are available, as JSON:\n<tools>\n{listed}\n</tools>\n\n{self.format}"

    def write_calls(self, calls: Sequence[Call]) -> str:
        """Past calls as the model itself would have written them."""
        before, after = self.around or ("", "")
        written = [f"{self.head_of(name)}{arguments}{self.end}{self.close}" for name, arguments in calls]
        return f"{before}{self.between.join(written)}{after}"

    def head_of(self, name: str) -> str:
        """A call of this function up to its arguments."""
        return f"{self.open}{self.begin}{name}{self.middle}"

    def write_result(self, content: str) -> str:
        """What a function gave back."""
        return f"<tool_response>\n{content}\n</tool_response>" if self is HERMES else content


HERMES = Dialect(
    open="<tool_call>",
    close="</tool_call>",
    around=(),
    separator="",
    head=re.compile(rf"\s*(?:\[\s*)?{_ENTRY}"),
    more=re.compile(rf"\s*\}}\s*,\s*{_ENTRY}"),
    tail=re.compile(r"[\s}\]]*"),
    begin='\n{"name": "',
    middle='", "arguments": ',
    end="}\n",
    between="\n",
    arguments_are_text=False,
    format=(
        "To call one, answer with a JSON object of its name and arguments inside tags, and nothing else:\n"
        '<tool_call>\n{"name": "function_name", "arguments": {"parameter": "value"}}\n</tool_call>\n'
        "Repeat that for several calls. If no function fits, answer in plain words."
    ),
)
_SEPARATOR = "<｜tool▁sep｜>"
DEEPSEEK = Dialect(
    open="<｜tool▁call▁begin｜>",
    close="<｜tool▁call▁end｜>",
    around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    separator=_SEPARATOR,
    # V3: a type, the name, fenced JSON. V3.1: the name, then JSON.
    head=re.compile(
        rf"function{_SEPARATOR}(?P<name>[\w-]{{1,64}})\s*```json\s*(?=\{{)|(?P<bare>[\w-]{{1,64}}){_SEPARATOR}\s*(?=\{{)"
    ),
    more=re.compile(r"(?!)"),
    tail=re.compile(r"[\s`]*"),
    begin="",
    middle=_SEPARATOR,
    end="",
    between="",
    arguments_are_text=True,
    format=(
        "To call one, answer in exactly this form, the arguments being a JSON object:\n"
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function_name{_SEPARATOR}"
        '{"parameter": "value"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>\n'
        "Repeat the inner part for several calls. If no function fits, answer in plain words."
    ),
)
DEEPSEEK_V3 = replace(DEEPSEEK, begin=f"function{_SEPARATOR}", middle="\n```json\n", end="\n```", between="\n")


def dialect_of(template: str | None) -> Dialect:
    """That of the model whose chat template this is."""
    if not template or not ("tool▁call" in template or "<｜Assistant｜>" in template):
        return HERMES
    return DEEPSEEK_V3 if "```json" in template else DEEPSEEK


def whole_calls(text: str, names: frozenset[str]) -> list[Call] | None:
    """The calls of a JSON text in any order of its keys; None if it is not all calls of known functions. Pure."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    calls: list[Call] = []
    for entry in found if isinstance(found, list) else [found]:
        if not isinstance(entry, dict) or entry.get("name") not in names:
            return None
        arguments = entry.get("arguments", entry.get("parameters", {}))
        if not isinstance(arguments, dict):
            return None
        calls.append((entry["name"], json.dumps(arguments, ensure_ascii=False)))
    return calls or None
