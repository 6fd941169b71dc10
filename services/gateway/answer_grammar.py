"""One grammar for a whole answer: what constrains its text, the tool calls in its place, and a thought before both."""

from __future__ import annotations

import json
from collections.abc import Mapping

from seqmtp_serve.errors import InvalidField
from services.gateway.reasoning import Thought, thought_rules
from services.gateway.structured_fields import FORMATS, Grammar
from services.gateway.tools.call_grammar import call_rules
from services.gateway.tools.dialects import Dialect
from services.gateway.tools.fields import ToolUse

TEXT = r"TEXT: /(.|\n)*/"


def answer_grammar(
    answer: Grammar | None,
    use: ToolUse,
    dialect: Dialect,
    special: Mapping[str, int],
    thought: Thought = Thought.UNPARSED,
) -> Grammar | None:
    """The constraint on text and the constraint on calls as one, from the end of the thought on.

    `special`: ids of tags, of tools and of thoughts, that are special tokens; `thought`: where the output begins.

    A model that was offered tools and owes an answer of some form may give that or call. A forced call comes in place
    of the answer, so `response_format` has no say then. Raises InvalidField for other constraints beside calls.
    """
    start = ["%llguidance {}", thought_rules(thought, special), TEXT]
    if not use.told or (answer is None and not use.is_constrained):
        if answer is None or thought not in (Thought.MAYBE, Thought.THINKING):
            return answer
        return Grammar(param=answer.param, text=_with_answer([*start, "body: @answer"], answer.text))
    if answer is not None and answer.param not in FORMATS:
        raise InvalidField(f"'{answer.param}' and tools cannot be asked for together.", param=answer.param)
    is_both = answer is not None and not use.forced
    try:
        rules = [*start, call_rules(use, dialect, special, answers=is_both)]
    except (ValueError, RecursionError) as error:
        raise InvalidField(f"A schema cannot be read: {str(error)[:300]}.", param="tools") from None
    if answer is None or not is_both:
        return Grammar(param="tools", text="\n".join(rules))
    return Grammar(param="tools", text=_with_answer([*rules, "answer: @answer"], answer.text))


def _with_answer(rules: list[str], answer: str) -> str:
    """A Lark grammar that may name another one, `@answer`."""
    inner = json.loads(answer)["grammars"][0] if answer.startswith("{") else {"lark_grammar": answer}
    whole = {"name": "whole", "lark_grammar": "\n".join(rules)}
    return json.dumps({"grammars": [whole, {**inner, "name": "answer"}]})
