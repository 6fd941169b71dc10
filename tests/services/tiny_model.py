"""A random llama model small enough for tests of processes, whose drafts are accepted now and then.

`model/synthetic.py` says how: acceptance lies well between none and all.
"""

from __future__ import annotations

import json
import string
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from seqmtp_serve.model.synthetic import TINY, mtp_tensors, target_tensors
from tests.unit.checkpoint import tiny_checkpoint

CONFIG = replace(TINY, vocab_size=64, max_position=16384)
NOISE = 1.2  # size of what a block adds to the residual stream


def write_tiny_model(root: Path, tokenizer: Tokenizer | None = None) -> Path:
    """Write target and MTP module into `root` (as one folder each) and return the target's. Token 1 is its end of text.

    Without a `tokenizer` a token reads as its number, which no grammar can follow; with one the vocabulary is its own.
    """
    shape = CONFIG if tokenizer is None else replace(CONFIG, vocab_size=tokenizer.get_vocab_size())
    target = target_tensors(shape, context=NOISE)
    module = {name: tensor for name, tensor in mtp_tensors(target, shape, noise=NOISE).items() if name not in target}
    for folder in (root / "tiny", root / "tiny-mtp"):
        folder.mkdir(parents=True)
    save_file(target, root / "tiny" / "model.safetensors")
    save_file(module, root / "tiny-mtp" / "model.safetensors")
    config = tiny_checkpoint.hf_config(shape) | {"eos_token_id": 1}
    (root / "tiny" / "config.json").write_text(json.dumps(config))
    (tokenizer or numbered_words()).save(str(root / "tiny" / "tokenizer.json"))
    manifest = tiny_checkpoint.manifest(target, module, shape) | {"draft_vocab_size": 0}
    (root / "tiny-mtp" / "manifest.json").write_text(json.dumps(manifest))
    return root / "tiny"


def numbered_words() -> Tokenizer:
    """Token 7 is the text `w7 `."""
    vocab = {f"w{token} ": token for token in range(CONFIG.vocab_size)}
    return Tokenizer(models.WordLevel(vocab, unk_token="w0 "))


def single_letters() -> Tokenizer:
    """One character a token, enough of them for JSON. Tokens 0 and 1 are special."""
    letters = string.ascii_lowercase + string.digits + '{}[]":,.-_' + string.ascii_uppercase[:15] + "Ġ"  # a space
    vocab = {token: number for number, token in enumerate(("<begin>", "<end>", *letters))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<begin>", special=True), AddedToken("<end>", special=True)])
    assert tokenizer.get_vocab_size() == CONFIG.vocab_size
    return tokenizer
