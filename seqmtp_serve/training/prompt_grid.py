"""User turns made from hand-written templates and lists of topics; nothing is taken from a benchmark.

The kinds mirror what people ask a small assistant: writing, roleplay, reasoning, maths, code, extraction, science,
humanities, translation, questions of fact, everyday help.
"""

from __future__ import annotations

import random

from seqmtp_serve.training.german_sentences import german_sentence
from seqmtp_serve.training.maths_problems import maths_problem
from seqmtp_serve.training.word_lists import word_lists

_SHARES = {
    "writing": 9,
    "role": 5,
    "reason": 5,
    "maths": 20,
    "code": 6,
    "extract": 5,
    "stem": 8,
    "humanities": 6,
    "fact": 16,
    "translate": 14,
    "everyday": 6,
}
_AMOUNTS = ("three", "four", "five", "seven", "ten")


def short_turn(rng: random.Random) -> str:
    """One user turn of at most about a hundred tokens."""
    (kind,) = rng.choices(list(_SHARES), list(_SHARES.values()))
    if kind == "maths":
        return maths_problem(rng)
    return fill(rng.choice(word_lists("templates")[kind]), rng)


def fill(template: str, rng: random.Random) -> str:
    """Replace each ``{field}`` of a template by a random word of that field."""
    return template.format_map(_Fields(rng))


class _Fields(dict[str, str]):
    """Draws a field when the template asks for it; a digit after a field's name asks for another draw of it."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self._names = dict(zip("nmo", rng.sample(word_lists("maths")["names"], 3), strict=True))
        self._first, self._step = rng.randint(1, 12), rng.randint(2, 9)

    def __missing__(self, key: str) -> str:
        rng = self._rng
        if key in self._names:
            return self._names[key]
        if key in ("a", "b", "c"):
            return str(rng.randint(2, 12))
        if key in ("s0", "s1", "s2", "s3"):
            return self._of_sequence(int(key[1]))
        if key == "year":
            return str(rng.randint(1900, 2022))
        if key == "few":
            return rng.choice(_AMOUNTS)
        if key == "g":
            return " ".join(german_sentence(rng) for _ in range(rng.choice((1, 1, 1, 2))))
        if key == "long":
            sentences = word_lists("fields")["SENTENCES"]
            return " ".join(fill(rng.choice(sentences), rng) for _ in range(rng.randint(2, 4)))
        return rng.choice(word_lists("fields")[key.rstrip("0123456789")])

    def _of_sequence(self, index: int) -> str:
        """An arithmetic sequence where the step is odd, doubling otherwise."""
        return str(self._first + index * self._step if self._step % 2 else self._first * 2**index)
