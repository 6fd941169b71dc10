"""A tiny byte-level tokenizer with chat markers: real merges of none, every character split into its bytes."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS = "<|im_start|>", "<|im_end|>"
WORDS = ("Ġhello", "Ġworld", "stop", "Ġthe", "ing", "Ġ1", "Ġ2")


def byte_tokenizer() -> Tokenizer:
    """257 byte symbols, a few whole words reached by merges, and two special tokens (ids 0 and 1)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab: dict[str, int] = {BOS: 0, EOS: 1}
    for symbol in alphabet:
        vocab.setdefault(symbol, len(vocab))
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        left = word[0]
        for symbol in word[1:]:
            if (left, symbol) not in merges:
                merges.append((left, symbol))
            left += symbol
            vocab.setdefault(left, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    return tokenizer
