"""A corpus that every machine with Python has: the standard library's own source, under the PSF licence.

Whole files are held out, chosen by their names. A byte-level BPE is trained on the rest; ids 0 and 1 are <bos>, <eos>.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from seqmtp_serve.errors import BadCorpus
from seqmtp_serve.training.joint.corpus import TOKENIZER, write_corpus

SPECIAL = ("<bos>", "<eos>", "<pad>")
# Test suites, generated tables and bundled third-party code: another licence, or text nobody writes.
_LEFT_OUT = (
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "encodings",
    "pydoc_data",
    "site-packages",
    "ensurepip",
    "turtledemo",
)
_HELD_OUT_IN = 40  # one file of so many


def library_files(root: Path | None = None) -> list[Path]:
    """The source files, sorted; `root` defaults to the running interpreter's library."""
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    return [path for path in sorted(root.rglob("*.py")) if not set(_LEFT_OUT) & set(path.relative_to(root).parts)]


def build_stdlib_corpus(out: Path, *, vocab_size: int, root: Path | None = None) -> dict[str, Any]:
    """Write the corpus and its tokenizer to `out`; returns what the record says about its sources."""
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    texts: dict[str, str] = {}
    seen = {"\n"}  # an empty file is no document, and no text is one twice
    for path in library_files(root):
        text = path.read_text(encoding="utf-8", errors="replace").strip() + "\n"
        if text not in seen:
            texts[str(path.relative_to(root))] = text
            seen.add(text)
    if len(texts) < 2:
        raise BadCorpus(f"{root}: no library source here")
    held_out = {name for name in texts if _is_held_out(name)} or {next(iter(texts))}
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer((text for name, text in texts.items() if name not in held_out), vocab_size)
    tokenizer.save(str(out / TOKENIZER))
    encoded = {name: [0, *tokenizer.encode(text).ids, 1] for name, text in texts.items()}
    about = {
        "source": f"CPython {platform.python_version()} standard library, source files without tests",
        "licence": "PSF-2.0",
        "bytes": sum(len(text.encode()) for text in texts.values()),
        "held_out_files": sorted(held_out),
    }
    splits = {
        "train": [ids for name, ids in encoded.items() if name not in held_out],
        "held_out": [ids for name, ids in encoded.items() if name in held_out],
    }
    write_corpus(out, splits, tokenizer.get_vocab_size(), about)
    return about


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE: every text has a spelling, and decoding gives it back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _is_held_out(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % _HELD_OUT_IN == 0
