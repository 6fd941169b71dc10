"""The hand-written words and templates in ``words/*.txt``: sections of one entry a line."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def word_lists(name: str) -> dict[str, tuple[str, ...]]:
    """All sections of ``words/{name}.txt``; ``\\n`` in an entry is a line break, a lone ``-`` an empty entry."""
    sections: dict[str, list[str]] = {}
    entries: list[str] = []
    text = files("seqmtp_serve.training").joinpath("words", f"{name}.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        if line.startswith("["):
            entries = sections.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            entries.append("" if line == "-" else line.replace("\\n", "\n"))
    return {section: tuple(found) for section, found in sections.items()}
