"""The body of POST /v1/responses: a string or message items, without state of earlier responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from seqmtp_serve.errors import InvalidField
from services.gateway.body import Body, GenerationBody, NumTop, WantedLogprobs
from services.gateway.chat_body import MAX_TURNS
from services.gateway.response_tools import FlatChoice, FlatTools, flat_tool_use, lacking, past_call, turns_of
from services.gateway.structured_body import NamedSchema, ResponseFormat
from services.gateway.tools.fields import Name, ToolUse

LOGPROBS = "message.output_text.logprobs"

# What would change the answer and is not supported, and the values that ask for nothing; beside `refused.REFUSED`.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "reasoning": ({}, {"effort": None}, {"effort": "none"}),
    "logprobs": (False,),
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
    """One item of the input: a message, a call, its result, or a thought, which is passed over as templates do."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Parts | None = None
    call_id: str | None = None
    name: Name | None = None
    arguments: str | None = None
    output: Parts | None = None

    def to_template(self, position: int) -> dict[str, Any]:
        """The turn as templates expect it. Raises InvalidField."""
        where = f"input[{position}]"
        if self.type == "function_call":
            if self.name is None or self.arguments is None:
                raise lacking("name" if self.name is None else "arguments", self.type, where)
            call = past_call(self.call_id or "", self.name, self.arguments, where)
            return {"role": "assistant", "content": "", "calls": [call]}
        if self.type == "function_call_output":
            if self.output is None:
                raise lacking("output", self.type, where)
            return {"role": "tool", "content": _joined(self.output, f"{where}.output")}
        if self.type != "message":
            raise InvalidField(f"Items of type '{self.type[:64]}' are not supported.", param=f"{where}.type")
        if self.role is None or self.content is None:
            missing = "role" if self.role is None else "content"
            raise InvalidField(f"A message needs {missing}.", param=f"{where}.{missing}")
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": _joined(self.content, f"{where}.content")}


def _joined(content: str | list[InputPart], where: str) -> str:
    """A content's text. Raises InvalidField."""
    if isinstance(content, str):
        return content
    for number, part in enumerate(content):
        if part.type not in ("input_text", "output_text", "text") or part.text is None:
            problem = f"Content of type '{part.type[:64]}' is not supported: this model reads text only."
            raise InvalidField(problem, param=f"{where}[{number}].type")
    return "\n".join(part.text or "" for part in content)


Input = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[Annotated[list[InputItem], Field(min_length=1, max_length=MAX_TURNS)], Tag("~items")],
    Discriminator(lambda value: "~items" if isinstance(value, list) else "~text"),
]


class TextFormat(NamedSchema):
    """As `response_format`, with the schema and its name beside the type."""

    type: Literal["text", "json_object", "json_schema"] = "text"


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
    chat_template_kwargs: dict[str, Any] | None = None
    tools: FlatTools | None = None
    tool_choice: FlatChoice | None = None
    parallel_tool_calls: bool | None = None

    def check(self) -> None:
        """Raises InvalidField for what the other routes take and this one does not."""
        if self.num_choices != 1:
            raise InvalidField("A response has one choice.", param="n")
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name) is not None:
                raise InvalidField("The budget of a response is 'max_output_tokens'.", param=name)
        if self.response_format is not None:
            raise InvalidField("The format of a response is 'text.format'.", param="response_format")

    @property
    def wanted_format(self) -> tuple[str, ResponseFormat | None]:
        """The field that says what form the text has, and its value as chat has it."""
        asked = None if self.text is None else self.text.format
        if asked is None:
            return "text.format", None
        has_schema = asked.type == "json_schema" or asked.schema_ is not None
        return "text.format", ResponseFormat(type=asked.type, json_schema=asked if has_schema else None)

    @property
    def tool_use(self) -> ToolUse:
        """What is asked of tools. Raises InvalidField for what cannot be."""
        return flat_tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

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
    def messages(self) -> list[dict[str, Any]]:
        """The conversation as templates expect it. Raises InvalidField."""
        begin = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*begin, {"role": "user", "content": self.input}]
        items = [(position, item) for position, item in enumerate(self.input) if item.type != "reasoning"]
        return turns_of([*begin, *(item.to_template(position) for position, item in items)])

    @property
    def told(self) -> dict[str, Any]:
        """What a response object repeats of its request."""
        return {
            "background": bool(self.background),
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": {name: str(value) for name, value in (self.metadata or {}).items()},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "prompt_cache_key": self.prompt_cache_key,
            "safety_identifier": self.safety_identifier,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {"format": _told(self.text.format) if self.text and self.text.format else {"type": "text"}},
            "tool_choice": _told(self.tool_choice)
            if isinstance(self.tool_choice, Body)
            else self.tool_choice or "auto",
            "tools": [{"parameters": None, "strict": False, **_told(tool)} for tool in self.tools or ()],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "user": self.user,
        }


def _told(value: Body) -> dict[str, Any]:
    return value.model_dump(mode="json", by_alias=True, exclude_none=True)
