"""What single tokens are called: the text each stands for, or its bytes where it is only a part of a character."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's byte fallback


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenName:
    """`text` tells tokens apart: part of a character is spelled `bytes:\\xe2\\x80`, as OpenAI does."""

    token_id: int
    text: str
    utf8: bytes


class TokenNames:
    """Names by token id, special tokens included."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        decoder = "" if tokenizer.decoder is None else tokenizer.decoder.__getstate__().decode()
        self._tokenizer = tokenizer
        self._is_byte_level = '"ByteLevel"' in decoder
        self._has_metaspace = "▁" in decoder
        self._added = tokenizer.get_added_tokens_decoder()
        self._known: dict[int, TokenName] = {}

    def __getitem__(self, token_id: int) -> TokenName:
        """The name of a token. One outside the vocabulary (padding rows of an embedding) stands for no text."""
        if token_id not in self._known:
            utf8 = self._bytes(token_id)
            try:
                text = utf8.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in utf8)
            self._known[token_id] = TokenName(token_id=token_id, text=text, utf8=utf8)
        return self._known[token_id]

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].content.encode()
        symbol = self._tokenizer.id_to_token(token_id) or ""
        if self._is_byte_level:
            return bytes(_BYTE_OF.get(char, ord("?")) for char in symbol)
        if found := _BYTE_TOKEN.fullmatch(symbol):
            return bytes([int(found[1], 16)])
        return (symbol.replace("▁", " ") if self._has_metaspace else symbol).encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE's letter for each byte: its own if it can be printed, else the next from U+0100 on (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


_BYTE_OF = _byte_level_alphabet()
