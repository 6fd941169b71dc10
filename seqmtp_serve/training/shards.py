"""Files of rolled-out text: tokens with the target's hidden row at each, one safetensors file a shard.

Tensors of a shard (N tokens of M documents, d hidden size): ``tokens`` int32 [N], ``hidden`` bf16 [N, d]
(pre-final-norm; the last row of a document is zero: nothing is predicted from it), ``lengths`` int32 [M],
``prompt_lengths`` int32 [M] (tokens before the reply), ``greedy`` bool [M].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One conversation: ``tokens`` [n], ``hidden`` [n, d] bf16, reply starting at ``prompt_len``."""

    tokens: torch.Tensor
    hidden: torch.Tensor
    prompt_len: int
    greedy: bool


def write_shard(path: Path, documents: list[Document]) -> None:
    """Write all documents, then rename, so that a reader never sees half a file."""
    partial = path.with_suffix(".partial")
    save_file(
        {
            "tokens": torch.cat([doc.tokens.int() for doc in documents]),
            "hidden": torch.cat([doc.hidden.bfloat16() for doc in documents]),
            "lengths": torch.tensor([len(doc.tokens) for doc in documents], dtype=torch.int32),
            "prompt_lengths": torch.tensor([doc.prompt_len for doc in documents], dtype=torch.int32),
            "greedy": torch.tensor([doc.greedy for doc in documents]),
        },
        partial,
    )
    partial.rename(path)


def write_shards(folder: Path, name: str, documents: Iterable[Document], *, shard_tokens: int) -> int:
    """``NAME-00000.safetensors`` and on, each of so many tokens or a few more; what has come when it is interrupted is
    kept. Returns how many there are.
    """
    waiting, num_written = list[Document](), 0

    def flush() -> None:
        nonlocal num_written
        write_shard(folder / f"{name}-{num_written:05d}.safetensors", waiting)
        num_written += 1
        waiting.clear()

    try:
        for document in documents:
            waiting.append(document)
            if sum(len(doc.tokens) for doc in waiting) >= shard_tokens:
                flush()
    finally:
        if waiting:
            flush()
    return num_written


def read_shard(path: Path) -> list[Document]:
    """All documents of one shard, in the order written."""
    with safe_open(path, framework="pt") as shard:
        tokens, hidden = shard.get_tensor("tokens").long(), shard.get_tensor("hidden")
        lengths = shard.get_tensor("lengths").tolist()
        prompts, greedy = shard.get_tensor("prompt_lengths").tolist(), shard.get_tensor("greedy").tolist()
    return [
        Document(tokens=t, hidden=h, prompt_len=p, greedy=g)
        for t, h, p, g in zip(tokens.split(lengths), hidden.split(lengths), prompts, greedy, strict=True)
    ]
