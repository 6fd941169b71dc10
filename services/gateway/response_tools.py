"""Tools in /v1/responses: flat descriptions, choices and past calls, turned into the forms of chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from seqmtp_serve.errors import InvalidField
from services.gateway.strict_body import Body
from services.gateway.tools.fields import (
    MAX_TOOLS,
    Allowance,
    AllowedTools,
    Function,
    Name,
    NamedFunction,
    NamedTool,
    PastCall,
    PastFunction,
    ToolSpec,
    ToolUse,
    tool_use,
)


class FlatTool(Body):
    """A function; nothing else can be offered here. The fields are those of chat's `Function`."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatName(Body):
    """One function."""

    type: Literal["function"]
    name: Name


class FlatAllowed(Body):
    """Some of the tools, and whether one of them has to be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatName], Field(min_length=1, max_length=MAX_TOOLS)]


def _kind_of(value: Any) -> str:
    if isinstance(value, str):
        return "~word"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "~allowed" if kind == "allowed_tools" else "~function"


FlatTools = Annotated[list[FlatTool], Field(max_length=MAX_TOOLS)]
FlatChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("~word")]
    | Annotated[FlatName, Tag("~function")]
    | Annotated[FlatAllowed, Tag("~allowed")],
    Discriminator(_kind_of),
]


def flat_tool_use(tools: Sequence[FlatTool] | None, choice: FlatChoice | None, parallel: bool | None) -> ToolUse:
    """What these fields ask for together. Raises InvalidField."""
    specs = [
        ToolSpec(
            type="function",
            function=Function(
                name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
            ),
        )
        for tool in tools or ()
    ]
    if isinstance(choice, FlatName):
        return tool_use(specs, _named(choice), parallel)
    if isinstance(choice, FlatAllowed):
        allowance = Allowance(mode=choice.mode, tools=[_named(tool) for tool in choice.tools])
        return tool_use(specs, AllowedTools(type="allowed_tools", allowed_tools=allowance), parallel)
    return tool_use(specs, choice, parallel)


def past_call(call_id: str, name: str, arguments: str, where: str) -> tuple[str, str, str]:
    """A call as `tools/conversation.py` reads it. Raises InvalidField for arguments that are no JSON object."""
    return call_id, *PastCall(function=PastFunction(name=name, arguments=arguments)).checked(where)


def turns_of(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with calls that follow each other, or an assistant's text, in one turn."""
    found: list[dict[str, Any]] = []
    for turn in turns:
        if "calls" in turn and found and found[-1]["role"] == "assistant":
            found[-1] = found[-1] | {"calls": [*found[-1].get("calls", ()), *turn["calls"]]}
        else:
            found.append(turn)
    return found


def lacking(name: str, kind: str, where: str) -> InvalidField:
    """An item lacks what its type needs."""
    return InvalidField(f"An item of type '{kind}' needs '{name}'.", param=f"{where}.{name}")


def _named(tool: FlatName) -> NamedTool:
    return NamedTool(type="function", function=NamedFunction(name=tool.name))
