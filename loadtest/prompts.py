"""Prompts for a load test: JSON lines of {"prompt": …} or {"category": …, "turns": […]} (MT-Bench, Spec-Bench)."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BUILT_IN = Path(__file__).parent / "prompts.jsonl"
"""A few prompts of our own, so that a load test needs no download. Too few to quote an E[R] from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One conversation's user turns."""

    turns: tuple[str, ...]
    category: str = "all"


def read_prompts(path: Path, max_chars: int = 0) -> list[Prompt]:
    """All prompts of a file, each turn cut to `max_chars` (0: whole).

    Raises ValueError naming the line that is of neither shape.
    """
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            turns = row["turns"] if "turns" in row else [row["prompt"]]
            if not turns or not all(isinstance(turn, str) and turn for turn in turns):
                raise TypeError("turns must be non-empty strings")
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f'{path}:{number} is neither {{"prompt"}} nor {{"turns"}}: {error}') from error
        cut = tuple(turn[: max_chars or None] for turn in turns)
        prompts.append(Prompt(turns=cut, category=str(row.get("category", "all"))))
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


def endless(prompts: list[Prompt], seed: int) -> Iterator[Prompt]:
    """Every prompt once in a shuffled order, then again in another, for ever."""
    draws = random.Random(seed)
    while True:
        yield from draws.sample(prompts, len(prompts))
