"""`tools`, `tool_choice`, and past calls in a conversation: what may be asked, and what it means."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag

from seqmtp_serve.errors import InvalidField
from services.gateway.body import Body

MAX_TOOLS = 128
Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(Body):
    """A function that the model may call. `parameters` is a JSON schema, shown to the model."""

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


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("~word")] | Annotated[NamedTool, Tag("~function")],
    Discriminator(lambda value: "~word" if isinstance(value, str) else "~function"),
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


def offered(tools: Sequence[ToolSpec] | None, choice: str | NamedTool | None) -> list[dict[str, Any]]:
    """The tools that the model is told of; none for `tool_choice: none`. Raises InvalidField."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidField("'tool_choice' needs 'tools'.", param="tool_choice")
        return []
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidField("Two tools have the same name.", param="tools")
    for position, tool in enumerate(tools):
        if tool.function.strict:
            problem = "'strict' is not supported: the arguments are the model's own, check them."
            raise InvalidField(problem, param=f"tools[{position}].function.strict")
    if isinstance(choice, NamedTool) or choice == "required":
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise InvalidField(f"There is no tool '{choice.function.name}'.", param="tool_choice")
        problem = "A call cannot be forced by this server: 'tool_choice' may be 'auto' or 'none'."
        raise InvalidField(problem, param="tool_choice")
    if choice == "none":
        return []
    return [tool.model_dump(exclude_none=True) for tool in tools]
