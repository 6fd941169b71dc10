"""SmolLM2's chat template as text pieces (the GGUF's ``tokenizer.chat_template`` with no system message given)."""

from __future__ import annotations

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
USER_OPENS = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
REPLY_OPENS = "<|im_end|>\n<|im_start|>assistant\n"


def first_turn(user_text: str) -> str:
    """The whole prompt for a first user turn, ending where the reply begins."""
    return f"{USER_OPENS}{user_text}{REPLY_OPENS}"
