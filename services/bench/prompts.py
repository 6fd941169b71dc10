"""Prompts for a bench: our own few for a chat model, places in Python source for `v3-tiny`, or any JSON-lines file of
`{"prompt"}` or `{"turns"}` (first turns).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from seqmtp_serve.checkpoint.locate import CODE_MODEL
from seqmtp_serve.errors import InvalidField

OWN_PROMPTS = Path(__file__).parent / "prompts.jsonl"
PYTHON_PROMPTS = Path(__file__).parent / "python_prompts.jsonl"  # of files that training held out
PREDICTABLE_PROMPTS = Path(__file__).parent / "predictable.jsonl"
RANDOM_TEMPERATURE = 2.0  # the text falls apart, and so do the drafts
KINDS = ("chat", "predictable", "random")
MAX_CHARS = 4000  # about a thousand tokens: leaves room for the reply in a context of 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Prompts of one kind, and how their replies are drawn: at temperature 0 greedily, else from a fixed seed."""

    name: str
    prompts: tuple[str, ...]
    temperature: float = 0.0

    @property
    def sampling(self) -> str:
        return f"temperature {self.temperature:g}, seeded" if self.temperature else "greedy"


def read_kinds(names: Sequence[str], own: Path, num_prompts: int) -> tuple[Kind, ...]:
    """Prompts by kind: everyday ones, such as are easy to draft for, and replies of random text where drafts fail."""
    kinds = []
    for name in names:
        if name not in KINDS:
            raise InvalidField(f"{name!r} is no kind of prompt; there are {', '.join(KINDS)}", param="kinds")
        path = PREDICTABLE_PROMPTS if name == "predictable" else own
        temperature = RANDOM_TEMPERATURE if name == "random" else 0.0
        kinds.append(Kind(name=name, prompts=read_prompts(path, num_prompts), temperature=temperature))
    return tuple(kinds)


def prompts_for(model: str) -> Path:
    """The file of prompts that the model `model` can do something with."""
    return PYTHON_PROMPTS if model == CODE_MODEL else OWN_PROMPTS


def long_prompts(model: str, num_prompts: int, num_chars: int) -> tuple[str, ...]:
    """Prompts of at least `num_chars` characters: the model's own, joined, each beginning elsewhere among them."""
    if model == CODE_MODEL:
        head, texts = "", read_prompts(PYTHON_PROMPTS, 1000)
    else:
        head, texts = (
            "Answer all of these:\n\n",
            read_prompts(OWN_PROMPTS, 1000) + read_prompts(PREDICTABLE_PROMPTS, 1000),
        )
    found = []
    for index in range(num_prompts):
        start, prompt = index * len(texts) // num_prompts, head
        for text in cycle(texts[start:] + texts[:start]):
            if len(prompt) >= num_chars:
                break
            prompt += f"{text}\n\n"
        found.append(prompt)
    return tuple(found)


def read_prompts(path: Path, num_prompts: int) -> tuple[str, ...]:
    """`num_prompts` prompts spread evenly over the file, each cut to MAX_CHARS. Raises InvalidField naming the line."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as fault:
        raise InvalidField(f"{path}: cannot be read ({fault})", param="prompts") from fault
    found = [_prompt(line, f"{path.name} line {number}") for number, line in enumerate(lines, 1)]
    if not found:
        raise InvalidField(f"{path}: holds no prompt", param="prompts")
    count = min(num_prompts, len(found))
    return tuple(found[index * len(found) // count][:MAX_CHARS] for index in range(count))


def _prompt(line: str, place: str) -> str:
    try:
        record = json.loads(line)
        prompt = record["prompt"] if "prompt" in record else record["turns"][0]
    except (ValueError, KeyError, IndexError, TypeError) as fault:
        raise InvalidField(f'{place}: must be {{"prompt"}} or {{"turns"}}', param="prompts") from fault
    if not isinstance(prompt, str) or not prompt:
        raise InvalidField(f"{place}: the prompt must be a text", param="prompts")
    return prompt
