"""A gateway over a scripted coordinator, in one process: what the gateway's tests stand on."""

from __future__ import annotations

from collections.abc import Sequence

import httpx
from fastapi import FastAPI
from tokenizers import Tokenizer

from services.gateway.app import create_app
from services.gateway.chat_template import ChatTemplate
from services.gateway.fake import FakeCoordinator
from services.gateway.text_model import TextModel
from services.settings import Settings
from tests.services.byte_tokenizer import EOS, byte_tokenizer

TOKENIZER: Tokenizer = byte_tokenizer()
EOS_ID: int = TOKENIZER.token_to_id(EOS)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = TextModel(
    tokenizer=TOKENIZER, template=ChatTemplate(TEMPLATE), eos_token_ids=(EOS_ID,), root="/models/fake-root"
)
MESSAGES = [{"role": "user", "content": "hi"}]


def ids(text: str) -> list[int]:
    """Token ids of a text."""
    return list(TOKENIZER.encode(text).ids)


def script(*rows: str, eos: bool = True) -> list[list[int]]:
    """Rounds from texts; the last one ends the text."""
    rounds = [ids(row) for row in rows]
    return [*rounds[:-1], [*rounds[-1], EOS_ID]] if eos else rounds


def fake(rows: Sequence[Sequence[int]] | None = None, **more: object) -> FakeCoordinator:
    """A coordinator that says hello world in three rows, or `rows`."""
    return FakeCoordinator(TOKENIZER, rows or script("h", "ello", " world"), **more)  # type: ignore[arg-type]


def app_over(coordinator: FakeCoordinator, settings: Settings | None = None) -> FastAPI:
    """The application over that coordinator."""
    return create_app(settings or Settings(), coordinator, TEXT)


def http(coordinator: FakeCoordinator | None = None, settings: Settings | None = None) -> httpx.AsyncClient:
    """A client that calls the application without a socket."""
    transport = httpx.ASGITransport(app_over(coordinator or fake(), settings), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")
