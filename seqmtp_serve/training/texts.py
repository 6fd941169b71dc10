"""Rolled-out texts without their hidden rows: two bytes a token, so that they can be kept; the rows are computed anew.

Sampling takes hours where computing rows takes minutes, and only the rows depend on nothing but the text and the target
(up to the last bits, which batches round differently).

Tensors of the file (N tokens of M texts): ``tokens`` uint16 or int32 [N], ``lengths`` int32 [M], ``prompt_lengths``
int32 [M], ``greedy`` bool [M]. Texts stand in the order of their tokens, so that those with the same prompt follow each
other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from seqmtp_serve.training.shards import Document
from seqmtp_serve.training.target import FrozenTarget, SlotCache

_SMALL = torch.iinfo(torch.uint16).max


def write_texts(path: Path, documents: Sequence[Document]) -> None:
    """Those that are there twice are kept once. Writes all, then renames."""
    ordered = sorted({tuple(doc.tokens.tolist()): doc for doc in documents}.items())
    tokens = torch.tensor([token for text, _ in ordered for token in text], dtype=torch.int32)
    partial = path.with_suffix(".partial")
    save_file(
        {
            "tokens": tokens.to(torch.uint16) if int(tokens.max()) <= _SMALL else tokens,
            "lengths": torch.tensor([len(text) for text, _ in ordered], dtype=torch.int32),
            "prompt_lengths": torch.tensor([doc.prompt_len for _, doc in ordered], dtype=torch.int32),
            "greedy": torch.tensor([doc.greedy for _, doc in ordered]),
        },
        partial,
    )
    partial.rename(path)


def read_texts(path: Path) -> list[Document]:
    """Documents whose ``hidden`` has no rows."""
    with safe_open(path, framework="pt") as kept:
        lengths = kept.get_tensor("lengths").tolist()
        tokens = kept.get_tensor("tokens").to(torch.int64).split(lengths)
        prompts, greedy = kept.get_tensor("prompt_lengths").tolist(), kept.get_tensor("greedy").tolist()
    nothing = torch.zeros(0, 0, dtype=torch.bfloat16)
    return [
        Document(tokens=each, hidden=nothing, prompt_len=prompt_len, greedy=is_greedy)
        for each, prompt_len, is_greedy in zip(tokens, prompts, greedy, strict=True)
    ]


def with_rows(texts: Sequence[Document], target: FrozenTarget, cache_dtype: torch.dtype) -> Iterator[Document]:
    """The texts with their hidden rows, the last one zero as in a rollout; what a text begins with alike is kept."""
    max_len = max((len(text.tokens) for text in texts), default=0)
    cache = SlotCache(target.shape, 1, max_len, cache_dtype)
    before = torch.zeros(0, dtype=torch.int64)
    rows = torch.zeros(max_len, target.shape.hidden_size, dtype=torch.bfloat16)
    for text in texts:
        computed = len(text.tokens) - 1
        same = min(_num_alike(before, text.tokens), computed - 1)
        rows[same:computed] = target.extend(text.tokens[same:computed], cache, 0, same).bfloat16()
        hidden = torch.zeros(computed + 1, rows.shape[1], dtype=torch.bfloat16)
        hidden[:computed] = rows[:computed]
        before = text.tokens[:computed]
        yield Document(tokens=text.tokens, hidden=hidden, prompt_len=text.prompt_len, greedy=text.greedy)


def _num_alike(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many tokens both begin with."""
    shorter = min(len(one), len(other))
    differ = (one[:shorter] != other[:shorter]).nonzero()
    return int(differ[0]) if len(differ) else shorter
