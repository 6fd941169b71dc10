"""The body of POST /v1/responses: a string or message items, without state of earlier responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from seqmtp_serve.errors import InvalidField
from services.gateway.body import Body, GenerationBody, NumTop, WantedLogprobs

LOGPROBS = "message.output_text.logprobs"

# What would change the answer and is not supported, and the values that ask for nothing; beside `refused.REFUSED`.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "max_tool_calls": (),
    "reasoning": ({}, {"effort": None}, {"effort": "none"}),
    "response_format": (),
    "context_management": ([],),
    "echo": (False,),
    "prompt_logprobs": (),
    "logprobs": (False,),
    "prediction": (),
}


class InputPart(Body):
    """One part of an item's content: text, whichever side it came from."""

    type: str
    text: str | None = None


Parts = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[InputPart], Tag("~parts")],
    Discriminator(lambda value: "~parts" if isinstance(value, list) else "~text"),
]


class InputItem(Body):
    """One item of the input. Messages only: no tool was called, and nothing is remembered that one could refer to."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Parts | None = None

    def to_template(self, position: int) -> dict[str, str]:
        """The message as templates expect it. Raises InvalidField."""
        where = f"input[{position}]"
        if self.type != "message":
            raise InvalidField(f"Items of type '{self.type[:64]}' are not supported.", param=f"{where}.type")
        if self.role is None or self.content is None:
            missing = "role" if self.role is None else "content"
            raise InvalidField(f"A message needs {missing}.", param=f"{where}.{missing}")
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return {"role": role, "content": self.content}
        for number, part in enumerate(self.content):
            if part.type not in ("input_text", "output_text", "text") or part.text is None:
                problem = f"Content of type '{part.type[:64]}' is not supported: this model reads text only."
                raise InvalidField(problem, param=f"{where}.content[{number}].type")
        return {"role": role, "content": "\n".join(part.text or "" for part in self.content)}


Input = Annotated[
    Annotated[str, Tag("~text")] | Annotated[Annotated[list[InputItem], Field(min_length=1)], Tag("~items")],
    Discriminator(lambda value: "~items" if isinstance(value, list) else "~text"),
]


class TextFormat(Body):
    """Plain text is the only format."""

    type: Literal["text"] = "text"


class TextOptions(Body):
    """`verbosity` "medium" is what happens anyway."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesBody(GenerationBody):
    """One response. vLLM's sampling fields are taken as in the other routes."""

    input: Input
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: NumTop | None = None

    def check(self) -> None:
        """Raises InvalidField for what the other routes take and this one does not."""
        if self.num_choices != 1:
            raise InvalidField("A response has one choice.", param="n")
        if self.max_tokens is not None:
            raise InvalidField("The budget of a response is 'max_output_tokens'.", param="max_tokens")

    def wanted_logprobs(self) -> WantedLogprobs:
        wanted = LOGPROBS in (self.include or ())
        if self.top_logprobs and not wanted:
            raise InvalidField(f"'top_logprobs' needs '{LOGPROBS}' in 'include'.", param="top_logprobs")
        return WantedLogprobs(output=self.top_logprobs or 0 if wanted else None)

    @property
    def budget(self) -> tuple[str, int | None]:
        """The field that bounds the answer, and its value."""
        return "max_output_tokens", self.max_output_tokens

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation as templates expect it. Raises InvalidField."""
        begin = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*begin, {"role": "user", "content": self.input}]
        return [*begin, *(item.to_template(position) for position, item in enumerate(self.input))]

    @property
    def told(self) -> dict[str, Any]:
        """What a response object repeats of its request."""
        return {
            "background": bool(self.background),
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": {name: str(value) for name, value in (self.metadata or {}).items()},
            "prompt_cache_key": self.prompt_cache_key,
            "safety_identifier": self.safety_identifier,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "user": self.user,
        }
