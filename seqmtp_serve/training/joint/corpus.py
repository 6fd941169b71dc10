"""A corpus on disk: token ids of whole documents, and a record that says what they are and lets them be checked.

    corpus.json                 sources, licence, vocabulary size, sha256 of the files below
    train.safetensors           tokens [n] int32, starts [documents + 1] int64
    held_out.safetensors        the same, of documents no training step reads
    tokenizer.json

Reading checks everything a run relies on; a file that does not fit its record raises BadCorpus, naming both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from seqmtp_serve.checkpoint.fingerprint import file_fingerprint
from seqmtp_serve.errors import BadCorpus

RECORD, TOKENIZER = "corpus.json", "tokenizer.json"
SPLITS = ("train", "held_out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """One split. `record` is the whole corpus's."""

    tokens: Tensor
    starts: Tensor
    record: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def document(self, index: int) -> list[int]:
        found: list[int] = self.tokens[self.starts[index] : self.starts[index + 1]].tolist()
        return found


def write_corpus(
    folder: Path, splits: Mapping[str, Sequence[Sequence[int]]], vocab_size: int, about: Mapping[str, Any]
) -> None:
    """Write both splits, then the record with their fingerprints. `tokenizer.json`, if any, must be there already."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        lengths = torch.tensor([0, *map(len, splits[split])])
        flat = [token for document in splits[split] for token in document]
        tensors = {"tokens": torch.tensor(flat, dtype=torch.int32), "starts": lengths.cumsum(0)}
        save_file(tensors, folder / f"{split}.safetensors")
    names = [f"{split}.safetensors" for split in SPLITS] + [TOKENIZER] * (folder / TOKENIZER).exists()
    record = {
        "vocab_size": vocab_size,
        "tokens": {split: sum(map(len, splits[split])) for split in SPLITS},
        "documents": {split: len(splits[split]) for split in SPLITS},
        "sha256": {name: file_fingerprint(folder / name) for name in names},
        **about,
    }
    (folder / RECORD).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_corpus(folder: Path, split: str, vocab_size: int) -> Corpus:
    """Raises BadCorpus when a file is missing, altered, not token ids of a model with `vocab_size`, or empty."""
    path = folder / f"{split}.safetensors"
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        expected = record["sha256"][path.name]
        actual = file_fingerprint(path)
        tensors = load_file(path) if actual == expected else {}
    except (OSError, ValueError, KeyError, SafetensorError) as fault:
        raise BadCorpus(f"{folder}: no readable corpus ({fault!r}); build one with `seqmtp train corpus`") from fault
    if actual != expected:
        raise BadCorpus(f"{path}: its record names sha256 {expected[:12]}, the file is {actual[:12]}; build it again")
    if record["vocab_size"] != vocab_size:
        raise BadCorpus(f"{folder}: tokens of a vocabulary of {record['vocab_size']}, the model has {vocab_size}")
    tokens, starts = tensors["tokens"], tensors["starts"]
    if not len(tokens) or int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        raise BadCorpus(f"{path}: holds no tokens, or ids outside 0..{vocab_size - 1}")
    if int(starts[0]) != 0 or int(starts[-1]) != len(tokens) or bool((starts.diff() < 1).any()):
        raise BadCorpus(f"{path}: document boundaries do not cover its tokens")
    return Corpus(tokens=tokens, starts=starts, record=record)
