"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from seqmtp_serve.errors import InvalidField
from services.gateway.body import Body, GenerationBody, NumTop, WantedLogprobs


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
    tool_calls: list[Any] | None = None
    function_call: Any = None

    def to_template(self, position: int) -> dict[str, str]:
        """The message as templates expect it, its parts joined. Raises InvalidField for what the model cannot read."""
        where = f"messages[{position}]"
        if self.role in ("tool", "function"):
            raise InvalidField(f"Tool calling is not supported: role '{self.role}'.", param=f"{where}.role")
        if self.tool_calls or self.function_call:
            name = "tool_calls" if self.tool_calls else "function_call"
            raise InvalidField("Tool calling is not supported.", param=f"{where}.{name}")
        message = {"role": "system" if self.role == "developer" else self.role, "content": self._text(where)}
        return message | ({"name": self.name} if self.name is not None else {})

    def _text(self, where: str) -> str:
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
    """A conversation. `max_completion_tokens` wins over `max_tokens`; without either the context is the limit."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prediction: Prediction | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None

    def wanted_logprobs(self) -> WantedLogprobs:
        if not self.logprobs and self.top_logprobs:
            raise InvalidField("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
        return WantedLogprobs(output=self.top_logprobs or 0 if self.logprobs else None)

    @property
    def budget(self) -> tuple[str, int | None]:
        """The field that bounds the answer, and its value."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens
