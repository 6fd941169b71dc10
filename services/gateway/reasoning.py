"""What a model thinks before it answers, told apart from the answer: DeepSeek's `<think>` … `</think>`.

A template opens the thought itself, or leaves it to the model, or has closed it already (V3.1 without `thinking`). Each
token's text is taken by itself, so that nothing depends on how tokens are cut into rows. Line ends right after the
thought belong to neither part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tokenizers import Tokenizer

from services.gateway.tools.tool_text import special_tags

OPEN, CLOSE = "<think>", "</think>"
TAGS = (OPEN, CLOSE)


class Thought(StrEnum):
    """Where an output is. `UNPARSED`: thoughts are not told apart, they are part of the text."""

    UNPARSED = ""
    MAYBE = "maybe"  # at its beginning: the model may open a thought
    THINKING = "thinking"
    GAP = "gap"  # after a thought
    ANSWERING = "answering"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one token adds; `is_thought`: it counts as a reasoning token."""

    reasoning: str = ""
    text: str = ""
    is_thought: bool = False


def begin_after(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> Thought:
    """Where an output after this prompt begins."""
    end = tokenizer.decode(list(prompt_ids[-16:]), skip_special_tokens=False).rstrip()
    if end.endswith(OPEN):
        return Thought.THINKING
    return Thought.ANSWERING if end.endswith(CLOSE) else Thought.MAYBE


def thought_rules(begin: Thought, special: Mapping[str, int]) -> str:
    """The rule `start` of a grammar (`answer_grammar.py`) whose `body` is constrained, the thought before it free."""
    if begin not in (Thought.MAYBE, Thought.THINKING):
        return "start: body"
    close = f"closed: TEXT <[{special[CLOSE]}]>" if CLOSE in special else f'closed[lazy]: TEXT "{CLOSE}"'
    thought = "\n".join([close, "thought: closed GAP?", r"GAP: /\n{1,2}/"])
    if begin is Thought.THINKING:
        return f"start: thought body\n{thought}"
    opened = f"<[{special[OPEN]}]>" if OPEN in special else f'"{OPEN}"'
    return f"start: {opened} thought body | body\n{thought}"


class ReasoningText:
    """One output's parts, token by token. Tags that are special tokens, which texts leave out, are put back."""

    def __init__(self, begin: Thought, tokenizer: Tokenizer) -> None:
        self._place, self._held = begin, ""
        self._tags = {token: tag for tag, token in special_tags(TAGS, tokenizer).items()}

    def push(self, tokens: Sequence[int], texts: Sequence[str], *, ended: bool) -> list[Part]:
        """What each token adds; `ended`: they are the last ones, and what was held comes with the last of them."""
        parts = []
        for place, (token, text) in enumerate(zip(tokens, texts, strict=True), 1):
            was_thought = self._place is Thought.THINKING
            reasoning, answer = self._take(self._tags.get(token, "") + text, last=ended and place == len(tokens))
            is_thought = was_thought or self._place is Thought.THINKING
            parts.append(Part(reasoning=reasoning, text=answer, is_thought=is_thought))
        return parts

    def _take(self, text: str, *, last: bool) -> tuple[str, str]:
        self._held += text
        reasoning = ""
        if self._place is Thought.MAYBE:
            begin = self._held.lstrip()
            if begin.startswith(OPEN):
                self._place, self._held = Thought.THINKING, begin.removeprefix(OPEN)
            elif last or not OPEN.startswith(begin):
                self._place = Thought.ANSWERING
        if self._place is Thought.THINKING:
            before, close, after = self._held.partition(CLOSE)
            stop = len(before) - (0 if close or last else _partial(before))
            reasoning, self._held = before[:stop], before[stop:]
            if close:
                self._place, self._held = Thought.GAP, after
        if self._place is Thought.GAP:
            self._held = self._held.lstrip("\r\n")
            if self._held:
                self._place = Thought.ANSWERING
        if self._place is not Thought.ANSWERING:
            return reasoning, ""
        answer, self._held = self._held, ""
        return reasoning, answer


def _partial(text: str) -> int:
    """Characters at the end of `text` that may begin the closing tag."""
    return next((size for size in range(min(len(CLOSE) - 1, len(text)), 0, -1) if CLOSE.startswith(text[-size:])), 0)
