"""What the gateway knows of the model: its tokenizer, its chat template and its end tokens. No weights, no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from seqmtp_serve.checkpoint.gguf_header import read_gguf_header
from seqmtp_serve.checkpoint.locate import locate
from seqmtp_serve.checkpoint.tokenizer import gguf_text_contract, gguf_tokenizer, hf_text_contract, hf_tokenizer
from seqmtp_serve.errors import InvalidField
from services.gateway.chat_template import ChatTemplate
from services.gateway.room import Room
from services.gateway.tools.dialects import Tool

LONG_TEXT = 16_384  # characters; above it the event loop does not wait for the tokenizer
MANY_TURNS = 256  # above it the event loop does not wait for the template


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """`root` is the checkpoint as it was asked for, which clients may need beside the name it is served under.

    `bos_token_id` begins every plain prompt; None when the model wants none there.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    eos_token_ids: tuple[int, ...]
    root: str
    bos_token_id: int | None = None
    longest_token: int = field(init=False)  # characters

    def __post_init__(self) -> None:
        object.__setattr__(self, "longest_token", max(map(len, self.tokenizer.get_vocab())))

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows, special ones with them."""
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    async def encode(self, text: str, *, add_special_tokens: bool, room: Room | None = None) -> list[int]:
        """Token ids of a text. Raises ContextOverflow, before any work, for one too long for any tokens in `room`."""
        if room is not None and len(text) > room.num_tokens * self.longest_token:
            raise room.overflow(f"The prompt's {len(text)} characters need more.")
        if len(text) > LONG_TEXT:
            ids = await asyncio.to_thread(self._encode_aside, text, add_special_tokens)
        else:
            ids = list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        if add_special_tokens and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *ids]
        return ids

    async def decode(self, ids: list[int]) -> str:
        """The text of token ids, special tokens included."""
        (text,) = await asyncio.to_thread(self.tokenizer.decode_batch, [ids], skip_special_tokens=False)
        return str(text)

    async def names(self, ids: list[int]) -> list[str]:
        """Each token as the vocabulary spells it; empty for one that the tokenizer does not know."""
        return await asyncio.to_thread(lambda: [self.tokenizer.id_to_token(token) or "" for token in ids])

    async def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
        more: Mapping[str, Any] | None = None,
        room: Room | None = None,
    ) -> list[int]:
        """Token ids of a conversation. The template writes its own special tokens: none are added.

        `more` are variables for the template; `room` is as for `encode`.
        """
        if self.template is None:
            raise InvalidField("This model has no chat template: use /v1/completions.", param="messages")
        render = partial(
            self.template.render, messages, tools=tools, add_generation_prompt=add_generation_prompt, more=more
        )
        text = await asyncio.to_thread(render) if len(messages) > MANY_TURNS else render()
        return await self.encode(text, add_special_tokens=False, room=room)

    def check_ids(self, ids: Sequence[int], param: str, room: Room | None = None) -> list[int]:
        """The ids themselves. Raises InvalidField for one the tokenizer does not know; first, without a look at any,
        ContextOverflow for more than fit into `room`.
        """
        if room is not None:
            room.check(len(ids))
        size = self.vocab_size
        if (highest := max(ids, default=0)) >= size:
            raise InvalidField(f"There is no token {highest}: the vocabulary has {size}.", param=param)
        return list(ids)

    def _encode_aside(self, text: str, add_special_tokens: bool) -> list[int]:
        """The same ids by the tokenizer's batch form: the only one that lets other threads run meanwhile."""
        (encoded,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoded.ids)


def open_text_model(model: str, chat_template: Path | None = None) -> TextModel:
    """The text side of a checkpoint, from its header alone. `chat_template` replaces the checkpoint's own.

    Raises ModelNotFound, TargetIncomplete (no tokenizer), or InvalidField for a template that is no Jinja.
    """
    target = locate(model).target
    if target.is_file():
        metadata = read_gguf_header(target).metadata
        tokenizer, contract = gguf_tokenizer(metadata), gguf_text_contract(metadata)
    else:
        tokenizer, contract = hf_tokenizer(target), hf_text_contract(target)
    source = contract.chat_template if chat_template is None else chat_template.read_text(encoding="utf-8")
    ends = contract.eos_token_ids
    names = {"bos_token": contract.bos_token_id, "eos_token": ends[0] if ends else None}
    special = {name: tokenizer.id_to_token(token) or "" for name, token in names.items() if token is not None}
    return TextModel(
        tokenizer=tokenizer,
        template=ChatTemplate(source, special) if source else None,
        eos_token_ids=ends,
        root=model,
        bos_token_id=contract.bos_token_id if contract.add_bos else None,
    )
