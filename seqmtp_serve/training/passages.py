"""Long user turns: summaries of, and questions over, passages the model wrote itself in earlier rollouts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from seqmtp_serve.training.shards import Document
from seqmtp_serve.training.word_lists import word_lists

_MIN_WORDS, _MAX_WORDS = 60, 420  # of a passage worth using, and of all passages of one turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A reply as plain text, with the user turn that asked for it."""

    question: str
    text: str


def passages_of(
    documents: Sequence[Document], decode: Callable[[list[int]], str], prefix_len: int, suffix_len: int
) -> list[Passage]:
    """Usable replies: long, no code. The template puts ``prefix_len`` and ``suffix_len`` tokens around a turn."""
    found = []
    for doc in documents:
        tokens = doc.tokens.tolist()
        text = decode(tokens[doc.prompt_len : -1]).strip()
        if len(text.split()) >= _MIN_WORDS and "```" not in text:
            question = decode(tokens[prefix_len : doc.prompt_len - suffix_len]).strip()
            found.append(Passage(question=question, text=" ".join(text.split())))
    return found


def long_turn(rng: random.Random, pool: Sequence[Passage]) -> str:
    """One user turn of some 100 to 700 tokens."""
    words, draw = word_lists("passages"), rng.random()
    if draw < 0.45:
        return rng.choice(words["summarise"]).format(text=_joined(rng, rng.sample(pool, rng.choice((1, 2, 2, 3, 4)))))
    if draw < 0.88:
        chosen = rng.sample(pool, rng.choice((2, 3, 4, 5)))
        return rng.choice(words["ask"]).format(text=_joined(rng, chosen), question=rng.choice(chosen).question)
    return rng.choice(words["work"]).format(text=_joined(rng, [rng.choice(pool)]))


def _joined(rng: random.Random, passages: Sequence[Passage]) -> str:
    each = _MAX_WORDS // len(passages)
    gap = rng.choice((" ", "\n", "\n\n"))
    return gap.join(" ".join(passage.text.split(" ")[:each]) for passage in passages)
