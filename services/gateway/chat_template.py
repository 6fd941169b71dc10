"""Chat templates: Jinja in a sandbox, rendering as the Hugging Face library does (`chat_template_utils.py` there).

Templates come with a model or from the operator, never from a request; they still run sandboxed and immutable, since a
model file is data. The test-suite compares the text with the library's own rendering.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from seqmtp_serve.errors import InvalidField
from services.gateway.strict_body import is_text
from services.gateway.tools.conversation import put_to_template
from services.gateway.tools.dialects import Tool, dialect_of


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; for serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012  (the name and type jinja2 asks for)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


_OURS = ("messages", "tools", "documents", "add_generation_prompt", "self")  # the last is Jinja's


class ChatTemplate:
    """One compiled template. Rendering is pure but for `strftime_now`, which some templates use for today's date."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self.dialect = dialect_of(source)
        self._knows_calls = "tool_calls" in source
        try:
            self._template = environment.from_string(source)
            self._knows_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise InvalidField(f"The chat template is not valid Jinja: {error}", param="chat_template") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text; `more` are the request's own variables. Raises InvalidField if the template refuses them."""
        if taken := {*_OURS, *self._special_tokens} & set(more or ()):
            problem = f"'{min(taken)}' is not for 'chat_template_kwargs': the server sets it."
            raise InvalidField(problem, param="chat_template_kwargs")
        turns = put_to_template(
            [dict(message) for message in messages],
            tools,
            self.dialect,
            knows_tools=self._knows_tools,
            knows_calls=self._knows_calls,
        )
        try:
            text = self._template.render(
                **(more or {}),
                messages=turns,
                tools=list(tools) if tools and self._knows_tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InvalidField(f"The chat template refused the messages: {error}", param="messages") from error
        if not is_text(text):  # the arguments of a past call are JSON in a string, and may spell one
            raise InvalidField("Half a surrogate pair is not text.", param="messages")
        return text
