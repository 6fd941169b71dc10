"""The room that a context leaves, and the error of what does not fit into it."""

from __future__ import annotations

from dataclasses import dataclass

from seqmtp_serve.errors import ContextOverflow


@dataclass(frozen=True, slots=True)
class Room:
    """The tokens of a context, and the request's field whose text is to fit into it."""

    num_tokens: int
    param: str

    def check(self, prompt_len: int) -> None:
        """Raises ContextOverflow for a prompt of so many tokens that none can follow."""
        if prompt_len >= self.num_tokens:
            raise self.overflow(f"The prompt has {prompt_len}; leave room for at least one more.")

    def overflow(self, reason: str, param: str | None = None) -> ContextOverflow:
        """The error. It begins with the phrase that clients look for to tell it from others."""
        phrase = f"This model's maximum context length is {self.num_tokens} tokens."
        return ContextOverflow(f"{phrase} {reason}", param=param or self.param)
