"""`tools`, `tool_choice`, and past calls in a conversation: what may be asked, and what it means."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag

from seqmtp_serve.errors import InvalidField
from services.gateway.body import Body

MAX_TOOLS = 128
Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(Body):
    """A function that the model may call. `parameters` is a JSON schema, shown to the model.

    `strict`: the arguments of a call keep to it. Those of a call that is asked for by `tool_choice` do anyway.
    """

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Body):
    """OpenAI's only kind of tool that a server can offer."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """Which one."""

    name: Name


class NamedTool(Body):
    """`tool_choice` as one function."""

    type: Literal["function"]
    function: NamedFunction


class Allowance(Body):
    """Some of the tools, and whether one of them has to be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Body):
    """`tool_choice` as a part of the tools: the model is told of all, and calls these only."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowance


def _kind_of(value: Any) -> str:
    if isinstance(value, str):
        return "~word"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "~allowed" if kind == "allowed_tools" else "~function"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("~word")]
    | Annotated[NamedTool, Tag("~function")]
    | Annotated[AllowedTools, Tag("~allowed")],
    Discriminator(_kind_of),
]
Tools = Annotated[list[ToolSpec], Field(max_length=MAX_TOOLS)]


class PastFunction(Body):
    """What was called. `arguments` is JSON text, as a call is given to clients."""

    name: Name
    arguments: str


class PastCall(Body):
    """A call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: PastFunction

    def checked(self, where: str) -> tuple[str, str]:
        """Name and arguments. Raises InvalidField for arguments that are no JSON object."""
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise InvalidField("The arguments of a call are the text of a JSON object.", param=f"{where}.function")
        return self.function.name, self.function.arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What a request says of tools: those the model is `told` of, the functions among them that it may call, and how.

    `forced`: the answer is a call. `one_call`: exactly one then, and never more. `is_strict`: by name, the arguments
    keep to the function's schema whoever chose to call it.
    """

    told: tuple[dict[str, Any], ...] = ()
    functions: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # name -> schema of its arguments
    strict: frozenset[str] = frozenset()
    forced: bool = False
    one_call: bool = False

    @property
    def is_constrained(self) -> bool:
        """Whether anything the model might write is ruled out."""
        return self.forced or bool(self.strict) or len(self.functions) < len(self.told)


NO_TOOLS = ToolUse()


def tool_use(tools: Sequence[ToolSpec] | None, choice: ToolChoice | None, parallel: bool | None) -> ToolUse:
    """What these fields ask for together; nothing for `tool_choice: none`. Raises InvalidField."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidField("'tool_choice' needs 'tools'.", param="tool_choice")
        return NO_TOOLS
    schemas = {tool.function.name: _schema(tool.function, f"tools[{place}]") for place, tool in enumerate(tools)}
    if len(schemas) < len(tools):
        raise InvalidField("Two tools have the same name.", param="tools")
    if choice == "none":
        return NO_TOOLS
    named: Sequence[str] = tuple(schemas)
    if isinstance(choice, NamedTool):
        named = [choice.function.name]
    elif isinstance(choice, AllowedTools):
        named = [tool.function.name for tool in choice.allowed_tools.tools]
    if unknown := [name for name in named if name not in schemas]:
        raise InvalidField(f"There is no tool '{unknown[0]}'.", param="tool_choice")
    is_required = isinstance(choice, AllowedTools) and choice.allowed_tools.mode == "required"
    return ToolUse(
        told=tuple(tool.model_dump(exclude_none=True) for tool in tools),
        functions={name: schemas[name] for name in schemas if name in named},
        strict=frozenset(tool.function.name for tool in tools if tool.function.strict and tool.function.name in named),
        forced=is_required or choice == "required" or isinstance(choice, NamedTool),
        one_call=parallel is False or isinstance(choice, NamedTool),
    )


def _schema(function: Function, where: str) -> dict[str, Any]:
    """The schema of its arguments, which are an object. Raises InvalidField."""
    schema = {"type": "object"} | (function.parameters or {})
    if schema["type"] != "object":
        raise InvalidField(
            "Arguments are an object, and so is their schema's type.", param=f"{where}.function.parameters"
        )
    return schema
