"""A random llama model small enough for tests of processes, whose drafts are accepted now and then.

`model/synthetic.py` says how: acceptance lies well between none and all.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from seqmtp_serve.model.synthetic import TINY, mtp_tensors, target_tensors
from tests.unit.checkpoint import tiny_checkpoint

CONFIG = replace(TINY, vocab_size=64, max_position=16384)
NOISE = 1.2  # size of what a block adds to the residual stream


def write_tiny_model(root: Path) -> Path:
    """Write target and MTP module into `root` (as one folder each) and return the target's."""
    target = target_tensors(CONFIG, context=NOISE)
    module = {name: tensor for name, tensor in mtp_tensors(target, CONFIG, noise=NOISE).items() if name not in target}
    for folder in (root / "tiny", root / "tiny-mtp"):
        folder.mkdir(parents=True)
    save_file(target, root / "tiny" / "model.safetensors")
    save_file(module, root / "tiny-mtp" / "model.safetensors")
    config = tiny_checkpoint.hf_config(CONFIG) | {"eos_token_id": 1}
    (root / "tiny" / "config.json").write_text(json.dumps(config))
    vocab = {f"w{token} ": token for token in range(CONFIG.vocab_size)}
    Tokenizer(models.WordLevel(vocab, unk_token="w0 ")).save(str(root / "tiny" / "tokenizer.json"))
    manifest = tiny_checkpoint.manifest(target, module, CONFIG) | {"draft_vocab_size": 0}
    (root / "tiny-mtp" / "manifest.json").write_text(json.dumps(manifest))
    return root / "tiny"
