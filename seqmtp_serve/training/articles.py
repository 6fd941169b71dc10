"""News articles as user turns: a hand-written beginning, the rest by the model itself, and what the turn asks for.

Summaries copy names and numbers out of a text; only an article full of them teaches a module to look them up.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from seqmtp_serve.training.word_lists import word_lists


@dataclass(frozen=True, slots=True, kw_only=True)
class ArticleTurn:
    """A user turn is ``opening``, what the model writes after it, then one of ``closings``."""

    opening: str
    closings: tuple[str, ...]


def article_turn(rng: random.Random) -> ArticleTurn:
    """Asks before the article two times of three, otherwise after it; then for two more things."""
    words = word_lists("articles")
    before = rng.choice(words["before"]) if rng.random() < 0.67 else ""
    closings = [rng.choice(words["end"] if before else words["ask"]), *rng.sample(words["ask"], 2)]
    return ArticleTurn(opening=before + _filled(rng, "opening"), closings=tuple(closings))


def _filled(rng: random.Random, section: str) -> str:
    return rng.choice(word_lists("articles")[section]).format_map(_Fields(rng))


class _Fields(dict[str, str]):
    """Draws a field when a template asks for it; a digit after the name asks for another draw."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def __missing__(self, key: str) -> str:
        rng = self._rng
        match key:
            case "lead":
                return _filled(rng, "lead")
            case "age" | "number":
                return str(rng.randint(16, 90))
            case "day":
                return str(rng.randint(1, 28))
            case "year":
                return str(rng.randint(1990, 2023))
            case "hour":
                return f"{rng.randint(1, 12):02}"
            case "minute":
                return f"{rng.randint(0, 59):02}"
        return rng.choice(word_lists("articles")[key.rstrip("0123456789")])
