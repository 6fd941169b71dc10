"""SmolLM2's chat template as text pieces (the GGUF's ``tokenizer.chat_template`` with no system message given)."""

from __future__ import annotations

from collections.abc import Callable

from seqmtp_serve.checkpoint.checkpoint import Checkpoint

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
USER_OPENS = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
REPLY_OPENS = "<|im_end|>\n<|im_start|>assistant\n"


def encoder(checkpoint: Checkpoint) -> Callable[[str], list[int]]:
    """Text to token ids; the template's special tokens are recognised, nothing is added."""
    tokenizer = checkpoint.tokenizer()

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return encode
