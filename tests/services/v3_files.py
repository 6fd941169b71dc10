"""The small made-up DeepSeek model (`model/synthetic.py`) as a folder in the released layout, with a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models

from seqmtp_serve.checkpoint import names
from seqmtp_serve.checkpoint.fp8 import BlockFormat
from seqmtp_serve.model.synthetic import TINY_V3, mtp_tensors, target_tensors
from tests.unit.checkpoint.tiny_deepseek import DeepseekFiles, as_stored

LAYER = names.layer_prefix(TINY_V3.num_layers)


def write_tiny_v3(
    folder: Path, *, blocks: BlockFormat | None = None, context: float = 0.8, noise: float = 0.8
) -> DeepseekFiles:
    """Two shards; the MTP layer stores embedding and head again. More `context` and `noise`: fewer drafts accepted."""
    target = target_tensors(TINY_V3, context=context)
    module = mtp_tensors(target, TINY_V3, noise=noise)
    copies = {LAYER + copy: target[owner].clone() for copy, owner in names.MTP_DUPLICATES.items()}
    files = DeepseekFiles(folder=folder, config=TINY_V3, blocks=blocks)
    files.write(as_stored(target | module | copies, blocks))
    vocab = {f"w{token} ": token for token in range(TINY_V3.vocab_size)}
    Tokenizer(models.WordLevel(vocab, unk_token="w0 ")).save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))
    return files
