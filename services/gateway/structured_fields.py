"""From a body's fields that constrain its answer to one grammar in llguidance's JSON form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, grammar_from

from seqmtp_serve.errors import InvalidField
from seqmtp_serve.speculation.grammar import GrammarCompiler
from services.gateway.body import GenerationBody
from services.gateway.schema_cost import MAX_COST, grammar_cost
from services.gateway.structured_body import StructuredOutputs

COMPILE_S = 5.0
# Between the parts of a JSON text. Without a bound a model may go on with white space for ever.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"
ANY_OBJECT = {"type": "object"}
FORMATS = ("response_format", "text.format")  # a call may come in place of these


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """`text` is what a target compiles, `param` the field that asked for it."""

    param: str
    text: str


def grammar_of(body: GenerationBody) -> Grammar | None:
    """The grammar the body asks for; None when it asks for free text. Raises InvalidField."""
    found = list(_grammars(body))
    if len(found) > 1:
        fields = " and ".join(f"'{grammar.param}'" for grammar in found)
        raise InvalidField(f"An answer can have one constraint only: {fields} ask for several.", param=found[1].param)
    return found[0] if found else None


async def check_grammar(compiler: GrammarCompiler, grammar: Grammar, eos_token_ids: tuple[int, ...]) -> None:
    """Compile it aside. Raises InvalidField, with the compiler's message, naming the field."""
    if grammar_cost(grammar.text) > MAX_COST:
        problem = f"The schema's alternatives multiply out to more than {MAX_COST}: nest fewer of them."
        raise InvalidField(problem, param=grammar.param)
    try:
        async with asyncio.timeout(COMPILE_S):
            await asyncio.to_thread(compiler.compile, grammar.text, eos_token_ids)
    except InvalidField as error:
        raise InvalidField(str(error), param=grammar.param) from None
    except TimeoutError:
        problem = f"The grammar did not compile within {COMPILE_S:.0f} s: make it smaller."
        raise InvalidField(problem, param=grammar.param) from None


def _grammars(body: GenerationBody) -> Iterator[Grammar]:
    param, wanted = body.wanted_format
    if wanted is not None:
        place = f"{param}.json_schema" if param == "response_format" else f"{param}.schema"
        if wanted.type != "json_schema" and wanted.json_schema is not None:
            raise InvalidField(f"A schema needs the type 'json_schema', not '{wanted.type}'.", param=place)
        if wanted.type == "json_object":
            yield _named(param, json_grammar, ANY_OBJECT)
        if wanted.type == "json_schema":
            if wanted.json_schema is None or wanted.json_schema.schema_ is None:
                raise InvalidField("'json_schema' needs a 'schema'.", param=place)
            yield _named(param, json_grammar, wanted.json_schema.schema_)
    asked = body.structured_outputs or StructuredOutputs()
    for kind, schema in (("json_object", ANY_OBJECT if asked.json_object else None), ("json", asked.json_)):
        if schema is not None:
            space = (asked.whitespace_pattern, bool(asked.disable_any_whitespace))
            yield _named(f"structured_outputs.{kind}", json_grammar, schema, *space)
    if body.guided_json is not None:
        yield _named("guided_json", json_grammar, body.guided_json)
    for kind, write in KINDS.items():
        for param, value in (
            (f"structured_outputs.{kind}", getattr(asked, kind)),
            (f"guided_{kind}", getattr(body, f"guided_{kind}")),
        ):
            if value is not None:
                yield _named(param, write, value)


def _named(param: str, write: Callable[..., str], *value: Any) -> Grammar:
    try:
        return Grammar(param=param, text=write(*value))
    except (ValueError, RecursionError) as error:
        raise InvalidField(f"The constraint cannot be read: {str(error)[:300]}.", param=param) from None


def json_grammar(schema: dict[str, Any] | str, whitespace: str | None = None, compact: bool = False) -> str:
    """The JSON texts that a schema takes, `compact` without white space. Raises ValueError for what is no object."""
    parsed = json.loads(schema) if isinstance(schema, str) else schema
    if not isinstance(parsed, dict):
        raise ValueError("a JSON schema is an object, this is no JSON object")
    if compact:
        return LLMatcher.grammar_from_json_schema(parsed, defaults={"whitespace_flexible": False})
    return LLMatcher.grammar_from_json_schema(parsed, defaults={"whitespace_pattern": whitespace or WHITESPACE})


def written_grammar(text: str) -> str:
    """Lark, or the BNF of llama.cpp, which `::=` tells apart. Raises ValueError."""
    return grammar_from("gbnf", text) if "::=" in text else LLMatcher.grammar_from_lark(text)


KINDS: Mapping[str, Callable[[Any], str]] = {
    "regex": LLMatcher.grammar_from_regex,
    "choice": lambda choices: grammar_from("choice", json.dumps(choices)),
    "grammar": written_grammar,
}
