"""Tokens in a terminal, coloured by where they came from, and the numbers of one answer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RESET = "\x1b[0m"
# 256-colour codes that read on light and dark; an underline tells a correction from a draft without colour.
STYLES = {
    "a": "\x1b[38;5;35m",
    "l": "\x1b[38;5;37m",
    "p": "\x1b[38;5;134m",
    "f": "\x1b[38;5;134m",
    "c": "\x1b[4;38;5;172m",
    "n": "\x1b[38;5;68m",
    "b": "\x1b[38;5;245m",
}
LEGEND = {
    "a": "drafted",
    "l": "copied",
    "p": "predicted",
    "f": "forced",
    "c": "corrected",
    "n": "bonus or plain",
    "b": "first",
}


def paint(row: Mapping[str, Any]) -> str:
    """A row's pieces, each in the colour of its origin."""
    origins = row["origins"].ljust(len(row["pieces"]), "n")
    return "".join(
        f"{STYLES.get(origin, '')}{piece}{RESET}"
        for piece, origin in zip(row["pieces"], origins, strict=False)
        if piece
    )


def dim(text: str) -> str:
    """A remark beside the text."""
    return f"\x1b[2m{text}{RESET}"


def legend() -> str:
    """One line that explains the colours."""
    return "  ".join(f"{STYLES[origin]}{name}{RESET}" for origin, name in LEGEND.items())


@dataclass(slots=True)
class Numbers:
    """What an answer counted, from the trace of its rows. Times are this process's own clock, seconds."""

    began: float = field(default_factory=time.monotonic)
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    rounds: int = 0  # that had drafts
    drafted: int = 0
    accepted: int = 0
    text: str = ""
    rows: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, row: Mapping[str, Any]) -> None:
        """Count one committed row."""
        self.last = time.monotonic()
        self.first = self.first or self.last
        self.rows.append(row)
        self.tokens += len(row["tokens"])
        self.rounds += row["drafted"] > 0
        self.drafted += row["drafted"]
        self.accepted += row["accepted"]

    def summary(self) -> dict[str, Any]:
        """E[R] as verified, acceptance, tokens a second after the first row; None where nothing is known."""
        seconds = self.last - self.first
        return {
            "expected_progress": 1 + self.accepted / self.rounds if self.rounds else None,
            "acceptance": self.accepted / self.drafted if self.drafted else None,
            "tokens": self.tokens,
            "tokens_per_s": (self.tokens - 1) / seconds if seconds > 0 else None,
            "first_token_s": self.first - self.began if self.first else None,
        }

    def line(self) -> str:
        """The same in one line for a person."""
        found = self.summary()
        parts = [] if found["expected_progress"] is None else [f"E[R] {found['expected_progress']:.2f}"]
        parts += [] if found["acceptance"] is None else [f"{100 * found['acceptance']:.0f} % of drafts accepted"]
        parts += [] if found["tokens_per_s"] is None else [f"{found['tokens_per_s']:.1f} tokens/s"]
        return " · ".join([*parts, f"{self.tokens} tokens"])
