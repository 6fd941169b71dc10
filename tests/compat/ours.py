"""What the service says of one answer: the other side of what a benchmark client prints. Standard library only."""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any

URL = os.environ["SEQMTP_URL"]
REQUESTS = 4
OUTPUT_TOKENS = 60


def answer() -> dict[str, Any]:
    """The answer that every request of the benchmark gets: the service says the same to everybody."""
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": OUTPUT_TOKENS}
    request = urllib.request.Request(
        f"{URL}/v1/chat/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as reply:
        found: dict[str, Any] = json.load(reply)
    return found


def compare(figures: dict[str, tuple[Any, Any]]) -> None:
    """Print each of the client's figures beside ours. Raises AssertionError where one differs."""
    for name, (theirs, ours) in figures.items():
        print(f"  {name:<44} {_shown(theirs):>22} {_shown(ours):>22}")
    differing = [name for name, (theirs, ours) in figures.items() if not _same(theirs, ours)]
    assert not differing, f"not equal: {', '.join(differing)}"


def _same(theirs: Any, ours: Any) -> bool:
    if isinstance(theirs, float) or isinstance(ours, float):
        return abs(theirs - ours) <= 1e-9 * max(1.0, abs(ours))
    return bool(theirs == ours)


def _shown(value: Any) -> str:
    if isinstance(value, set):
        return ", ".join(map(_shown, value))
    if isinstance(value, dict):
        return " ".join(f"{name}:{number}" for name, number in value.items())
    return f"{value:.4f}" if isinstance(value, float) else str(value)
