"""`seqmtp bench prefix`: each prompt twice in a row, once new and once known.

A prompt starts with a word that no other one has, so the first time nothing of it is cached; nothing lies between the
two, so the second time all its full pages are. Medians over the repeats; a ratio is hit over cold.
"""

from __future__ import annotations

import itertools
import uuid
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any

from tqdm import tqdm

from services.bench.backend import Backend, Generation
from services.bench.machine import describe_machine

_FILLER = "the river carried small boats past quiet fields and old stone houses while people walked home"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixWorkload:
    """`words`: lengths of the prompts; each is sent `repeats` times two."""

    words: tuple[int, ...] = (100, 400, 1000)
    depth: int = 1
    max_tokens: int = 48
    repeats: int = 5


async def measure_prefix(backend: Backend, workload: PrefixWorkload) -> dict[str, Any]:
    """Run all prompts and return the report. Progress goes to standard error."""
    pairs: dict[int, list[tuple[Generation, Generation]]] = {num_words: [] for num_words in workload.words}
    await backend.generate("warm up", depth=workload.depth, max_tokens=workload.max_tokens)
    with tqdm(total=len(pairs) * workload.repeats, unit="prompt", desc="bench") as progress:
        for _ in range(workload.repeats):
            for num_words, found in pairs.items():
                prompt = _prompt(num_words)
                cold, hit = [
                    await backend.generate(prompt, depth=workload.depth, max_tokens=workload.max_tokens)
                    for _ in range(2)
                ]
                found.append((cold, hit))
                progress.update()
    return {
        "model": backend.model,
        "numerics": backend.numerics,
        "machine": describe_machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "workload": asdict(workload),
        "prompts": [_compared(num_words, found) for num_words, found in pairs.items()],
    }


def _prompt(num_words: int) -> str:
    filler = itertools.islice(itertools.cycle(_FILLER.split()), num_words)
    return f"{uuid.uuid4().hex} {' '.join(filler)}. What happens next?"


def _compared(num_words: int, pairs: list[tuple[Generation, Generation]]) -> dict[str, Any]:
    cold_ms, hit_ms = ([pair[side].first_token_s * 1e3 for pair in pairs] for side in (0, 1))
    cold_token, hit_token = ([_token_ms(pair[side]) for pair in pairs] for side in (0, 1))
    return {
        "words": num_words,
        "prompt_tokens": int(median(cold.num_prompt_tokens for cold, _ in pairs)),
        "cached_tokens": int(median(hit.num_cached for _, hit in pairs)),
        "cached_tokens_cold": max(cold.num_cached for cold, _ in pairs),
        "first_token_ms_cold": median(cold_ms),
        "first_token_ms_hit": median(hit_ms),
        "first_token_ratio": median(hit / cold for cold, hit in zip(cold_ms, hit_ms, strict=True)),
        "token_ms_cold": median(cold_token),
        "token_ms_hit": median(hit_token),
        "token_ratio": median(hit / cold for cold, hit in zip(cold_token, hit_token, strict=True)),
        "text_equal": all(cold.text == hit.text for cold, hit in pairs),
    }


def _token_ms(reply: Generation) -> float:
    """Of a token after the first row."""
    return (reply.total_s - reply.first_token_s) * 1e3 / max(1, reply.num_tokens - 1)
