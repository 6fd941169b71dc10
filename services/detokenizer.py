"""Token ids to text, one token at a time: the same pieces in coordinator (stop strings) and gateway (what is shown).

A piece is what one token adds to the decoded text. It is empty for special tokens and while a character is unfinished
(one emoji may take four tokens): the whole character then comes with the token that ends it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """The decoder of one output. Call it with each committed token, in order; never with a draft.

    Primed with the prompt: where decoding depends on what stands before (leading spaces), the first piece is right.
    `special`: special tokens have their own text as pieces.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, special: bool = False) -> None:
        self._tokenizer, self._skip = tokenizer, not special
        self._vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self._stream = DecodeStream(ids=list(prompt_ids), skip_special_tokens=self._skip)
        self._pending: list[int] = []

    def __call__(self, token_id: int) -> str:
        """The token's piece. A token outside the tokenizer's vocabulary (padding rows of an embedding) has none."""
        if not 0 <= token_id < self._vocab_size:
            return ""
        piece = self._step(token_id)
        if piece is None:
            self._pending.append(token_id)
            return ""
        self._pending.clear()
        return piece

    def _step(self, token_id: int) -> str | None:
        try:
            return self._stream.step(self._tokenizer, token_id)
        except Exception:
            # "Invalid prefix": bytes before this token changed their reading (a prompt that ends inside a character).
            # A fresh stream reads on from here.
            self._stream = DecodeStream(skip_special_tokens=self._skip)
            return self._stream.step(self._tokenizer, token_id)

    def flush(self) -> str:
        """The text of a character that was never finished (replacement characters), for the end of an output."""
        pending, self._pending = self._pending, []
        return self._tokenizer.decode(pending, skip_special_tokens=self._skip) if pending else ""
