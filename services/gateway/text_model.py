"""What the gateway knows of the model: its tokenizer, its chat template and its end tokens. No weights, no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from seqmtp_serve.errors import InvalidField
from services.gateway.chat_template import ChatTemplate

LONG_TEXT = 16_384  # characters; above it the event loop does not wait for the tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """`root` is the checkpoint's own name, which clients may need beside the name it is served under."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    eos_token_ids: tuple[int, ...]
    root: str

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows, special ones with them."""
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        if len(text) > LONG_TEXT:
            return await asyncio.to_thread(self._encode, text, add_special_tokens)
        return self._encode(text, add_special_tokens)

    async def encode_chat(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation. The template writes its own special tokens: none are added."""
        if self.template is None:
            raise InvalidField("This model has no chat template: use /v1/completions.", param="messages")
        text = self.template.render(messages, add_generation_prompt=add_generation_prompt)
        return await self.encode(text, add_special_tokens=False)

    def check_ids(self, ids: Sequence[int], param: str) -> list[int]:
        """The ids themselves. Raises InvalidField for one the tokenizer does not know."""
        size = self.vocab_size
        if any(token >= size for token in ids):
            raise InvalidField(f"There is no token {max(ids)}: the vocabulary has {size}.", param=param)
        return list(ids)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
