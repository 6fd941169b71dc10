"""The fields that constrain an answer: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, StringConstraints, Tag

from services.gateway.strict_body import Body

MAX_GRAMMAR_LEN = 1 << 16  # characters

GrammarText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_GRAMMAR_LEN)]
Choices = Annotated[list[GrammarText], Field(min_length=1, max_length=1024)]
Schema = Annotated[
    Annotated[GrammarText, Tag("~text")] | Annotated[dict[str, Any], Tag("~object")],
    Discriminator(lambda value: "~text" if isinstance(value, str) else "~object"),
]


class NamedSchema(Body):
    """A JSON schema as OpenAI sends it. `strict` changes nothing: a schema is always kept to."""

    model_config = ConfigDict(extra="forbid")

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    """`json_schema` belongs to the type of that name. Nothing else is understood here: a constraint is never lost."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Body):
    """At most one of `json`, `json_object`, `regex`, `choice` and `grammar`. Nothing else is understood here."""

    model_config = ConfigDict(extra="forbid")

    json_: Annotated[Schema | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    whitespace_pattern: GrammarText | None = None
    disable_any_whitespace: bool | None = None
