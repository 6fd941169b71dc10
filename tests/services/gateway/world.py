"""A gateway over a scripted coordinator, in one process: what the gateway's tests stand on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
from fastapi import FastAPI
from pydantic import TypeAdapter
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
CHAT = "/v1/chat/completions"
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


def app_over(coordinator: FakeCoordinator, settings: Settings | None = None, text: TextModel = TEXT) -> FastAPI:
    """The application over that coordinator."""
    return create_app(settings or Settings(), coordinator, text)


def http(
    coordinator: FakeCoordinator | None = None, settings: Settings | None = None, text: TextModel = TEXT
) -> httpx.AsyncClient:
    """A client that calls the application without a socket."""
    transport = httpx.ASGITransport(app_over(coordinator or fake(), settings, text), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")


def strictly(kind: Any, raw: str) -> None:
    """Raises unless the raw JSON is exactly what OpenAI's types say; the client itself checks nothing."""
    TypeAdapter(kind).validate_json(raw, strict=True)


def events(body: str) -> list[tuple[str | None, Any]]:
    """(id, data) of each server-sent event; data of [DONE] is that string."""
    found = []
    for block in body.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        found.append((fields.get("id"), data if data == "[DONE]" else json.loads(data)))
    return found


async def streamed(client: Any, path: str = CHAT, **fields: Any) -> list[tuple[str | None, Any]]:
    body = {"stream": True, **({"messages": MESSAGES} if path == CHAT else {}), **fields}
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events(answer.text)
