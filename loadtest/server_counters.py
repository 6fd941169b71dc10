"""What the server itself counted during a run: `/metrics` before and after. Works for any server with vLLM's names."""

from __future__ import annotations

import re
import urllib.request

_SAMPLE = re.compile(r"^vllm:(spec_decode_num_\w+?)(?:_total)?(?:\{(.*)\})? ([0-9.eE+-]+)$", re.MULTILINE)
Counters = dict[str, float]


def read_counters(host: str) -> Counters | None:
    """Sums over all processes; None for a server without such metrics."""
    try:
        with urllib.request.urlopen(f"{host}/metrics", timeout=10) as response:
            found = parse_counters(response.read().decode())
    except (OSError, ValueError):
        return None
    return found or None


def parse_counters(text: str) -> Counters:
    """`drafts`, `draft_tokens`, `accepted_tokens`, and accepted_tokens_per_pos.J. Pure."""
    sums: Counters = {}
    for name, labels, value in _SAMPLE.findall(text):
        position = re.search(r'position="(\d+)"', labels)
        key = name.removeprefix("spec_decode_num_") + (f".{position[1]}" if position else "")
        sums[key] = sums.get(key, 0.0) + float(value)
    return {name: value for name, value in sums.items() if not name.endswith("_created")}


def acceptance_length(before: Counters | None, after: Counters | None) -> float | None:
    """E[R] as verified, of the time between: 1 + accepted / rounds with drafts. None when there were none."""
    if before is None or after is None:
        return None
    rounds, accepted = (after.get(name, 0.0) - before.get(name, 0.0) for name in ("drafts", "accepted_tokens"))
    return 1 + accepted / rounds if rounds > 0 else None
