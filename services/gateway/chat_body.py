"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from seqmtp_serve.errors import InvalidField
from services.gateway.body import Body, GenerationBody, NumTop, WantedLogprobs
from services.gateway.tools.fields import MAX_TOOLS, PastCall, ToolChoice, Tools, ToolUse, tool_use

MAX_TURNS = 4096


class ContentPart(Body):
    """One part of a message. Only text can be read by a text model; `to_template` refuses the others by name."""

    type: str
    text: str | None = None


Content = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[ContentPart], Tag("~parts")],
    Discriminator(lambda value: "~parts" if isinstance(value, list) else "~text"),
]


class Message(Body):
    """One turn. `developer` is OpenAI's newer word for `system`; templates know only the old one."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = None
    prefix: bool | None = None
    tool_calls: Annotated[list[PastCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    function_call: Any = None

    def to_template(self, position: int) -> dict[str, Any]:
        """The message as templates expect it, its parts joined; past tool calls are in `calls`, each (id, name, JSON).

        Raises InvalidField for what the model cannot read.
        """
        where = f"messages[{position}]"
        if self.role == "function":
            raise InvalidField("Role 'function' is not supported: use 'tool'.", param=f"{where}.role")
        if self.function_call:
            raise InvalidField("'function_call' is not supported: use 'tool_calls'.", param=f"{where}.function_call")
        if self.prefix:
            raise InvalidField("A message cannot be gone on with: leave 'prefix' out.", param=f"{where}.prefix")
        if self.tool_calls and self.role != "assistant":
            raise InvalidField("Only an assistant calls tools.", param=f"{where}.tool_calls")
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        message["content"] = self._text(where)
        if self.tool_calls:
            message["calls"] = [
                (call.id or "", *call.checked(f"{where}.tool_calls[{number}]"))
                for number, call in enumerate(self.tool_calls)
            ]
        return message | ({"name": self.name} if self.name is not None else {})

    def _text(self, where: str) -> str:
        if self.content is None and self.tool_calls:
            return ""
        if self.content is None:
            raise InvalidField("A message needs content.", param=f"{where}.content")
        if isinstance(self.content, str):
            return self.content
        for number, part in enumerate(self.content):
            if part.type != "text":
                problem = f"Content of type '{part.type[:64]}' is not supported: this model reads text only."
                raise InvalidField(problem, param=f"{where}.content[{number}].type")
            if part.text is None:
                raise InvalidField("A text part needs text.", param=f"{where}.content[{number}].text")
        return "\n".join(part.text or "" for part in self.content)


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_TURNS)]


class Prediction(Body):
    """What the caller expects of the answer: a source of drafts."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        """Its parts joined. Raises InvalidField for a part that is no text."""
        if isinstance(self.content, str):
            return self.content
        if any(part.type != "text" or part.text is None for part in self.content):
            raise InvalidField("A prediction is text.", param="prediction.content")
        return "".join(part.text or "" for part in self.content)


class ChatBody(GenerationBody):
    """A conversation. Without a budget the context is the limit."""

    messages: Messages
    chat_template_kwargs: dict[str, Any] | None = None
    prediction: Prediction | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    def wanted_logprobs(self) -> WantedLogprobs:
        if not self.logprobs and self.top_logprobs:
            raise InvalidField("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
        return WantedLogprobs(output=self.top_logprobs or 0 if self.logprobs else None)

    @property
    def tool_use(self) -> ToolUse:
        """What is asked of tools. Raises InvalidField for what cannot be."""
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def budget(self) -> tuple[str, int | None]:
        """The field that bounds the answer, and its value."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens
