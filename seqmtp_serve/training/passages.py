"""Long user turns: summaries of, and questions over, passages the model wrote itself in earlier rollouts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from seqmtp_serve.training.shards import Document

_SUMMARISE = (
    "Summarize the following text: {text}|Please summarize this article:\n\n{text}|{text}\n\nSummarize the text above.|"
    "Give a short summary of this news story. {text}|Write a two-sentence summary:\n{text}|What is this text about? {text}|"
    "Summarize this in bullet points:\n\n{text}|{text}\nTL;DR|Sum up the key points of this report: {text}|Summarise: {text}"
).split("|")
_ASK = (
    "{text}\n{question}|{text}\n\nQuestion: {question}|Use the passages to answer. {text} {question}|"
    "Context:\n{text}\n\nAnswer this question: {question}|Here are some search results:\n{text}\n{question}|"
    "Based on these documents, {question}\n\n{text}"
).split("|")
_WORK = (
    "Rewrite the following text in simpler words:\n\n{text}|Extract all names and numbers from this text:\n{text}|"
    "List the main arguments of this text:\n\n{text}|Write a title for this text: {text}|"
    "Ask three questions that this text answers.\n\n{text}|Continue this text:\n\n{text}|Make this text shorter:\n\n{text}"
).split("|")
_MIN_WORDS, _MAX_WORDS = 60, 420  # of a passage worth using, and of all passages of one turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A reply as plain text, with the user turn that asked for it."""

    question: str
    text: str


def passages_of(
    documents: Sequence[Document], decode: Callable[[list[int]], str], prefix_len: int, suffix_len: int
) -> list[Passage]:
    """Usable replies: long enough, no code. ``prefix_len`` and ``suffix_len`` are the template's tokens around a turn."""
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
    draw = rng.random()
    if draw < 0.45:
        return rng.choice(_SUMMARISE).format(text=_joined(rng, rng.sample(pool, rng.choice((1, 2, 2, 3, 4)))))
    if draw < 0.88:
        chosen = rng.sample(pool, rng.choice((2, 3, 4, 5)))
        return rng.choice(_ASK).format(text=_joined(rng, chosen), question=rng.choice(chosen).question)
    return rng.choice(_WORK).format(text=_joined(rng, [rng.choice(pool)]))


def _joined(rng: random.Random, passages: Sequence[Passage]) -> str:
    each = _MAX_WORDS // len(passages)
    gap = rng.choice((" ", "\n", "\n\n"))
    return gap.join(" ".join(passage.text.split(" ")[:each]) for passage in passages)
