"""A tiny checkpoint in the released DeepSeek-V3 layout that can be served: sharded, its MTP layer after the main ones,
a tokenizer, and drafts that are accepted now and then.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer, models

from seqmtp_serve.model.synthetic import TINY_V3, mtp_tensors, target_tensors
from tests.unit.checkpoint.tiny_deepseek import DeepseekFiles

CONFIG = replace(TINY_V3, max_position=4096)


def write_tiny_v3(folder: Path) -> Path:
    """Write it into `folder`, which is made, and return that."""
    target = target_tensors(CONFIG, context=1.0)
    files = DeepseekFiles(folder=folder, config=CONFIG)
    files.write(target | mtp_tensors(target, CONFIG))
    vocab = {f"w{token} ": token for token in range(CONFIG.vocab_size)}
    Tokenizer(models.WordLevel(vocab, unk_token="w0 ")).save(str(folder / "tokenizer.json"))
    return folder
