"""Thousands of streamed completions from one event loop, over plain sockets: as little work a chunk as can be.

Every stream's token count is checked. One in `TRACED` asks for its ledger: its tokens are compared with the simulated
text, and each row's delay is taken from the commit's answer to the arrival here (one clock: this machine's monotonic).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from seqmtp_serve.errors import InternalError
from seqmtp_serve.request import Request, SamplingParams
from seqmtp_serve.simulated import MODEL, simulated_text

TRACED = 16
MAX_TRIES = 60
RETRY_S = 1.0
PROMPT_LEN = 8
_USAGE = b'"completion_tokens":'


@dataclass(slots=True)
class Seen:
    """What the streams of one run showed."""

    num_tokens: int = 0
    num_chunks: int = 0
    first_chunk_ms: list[float] = field(default_factory=list)
    emit_ms: list[float] = field(default_factory=list)  # of traced rows
    wrong: list[str] = field(default_factory=list)
    num_refused: int = 0  # 503: asked again a second later


async def run_streams(url: str, count: int, max_tokens: int, vocab_size: int, seen: Seen) -> None:
    """All at once, to their ends. Raises InternalError for an answer that is none."""
    async with asyncio.TaskGroup() as group:
        for index in range(count):
            group.create_task(_stream(url, index, max_tokens, vocab_size, seen))


async def _stream(url: str, index: int, max_tokens: int, vocab_size: int, seen: Seen) -> None:
    for _ in range(MAX_TRIES):
        if await _one_try(url, index, max_tokens, vocab_size, seen):
            return
        seen.num_refused += 1
        await asyncio.sleep(RETRY_S)
    raise InternalError(f"stream {index} was refused {MAX_TRIES} times")


async def _one_try(url: str, index: int, max_tokens: int, vocab_size: int, seen: Seen) -> bool:
    """The whole stream; False if it was refused with 503, which promises that nothing has run."""
    parts, traced = urlsplit(url), index % TRACED == 0
    prompt = [(index * 31 + place) % vocab_size for place in range(PROMPT_LEN)]
    body = json.dumps(_body(prompt, max_tokens, traced)).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    started, tokens, counted, is_first = monotonic(), list[int](), 0, True
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**20)
    try:
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 503 " in status:
            return False
        if b" 200 " not in status:
            raise InternalError(f"stream {index}: {(status + await reader.read(600)).decode(errors='replace')}")
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            arrived_ms = 1e3 * monotonic()
            if is_first:
                is_first = False
                seen.first_chunk_ms.append(arrived_ms - 1e3 * started)
            seen.num_chunks += 1
            if traced:
                _take(line, arrived_ms, tokens, seen)
            if _USAGE in line:
                counted = int(line.partition(_USAGE)[2].split(b",")[0].rstrip(b"}\n "))
    finally:
        writer.close()
    seen.num_tokens += counted
    if counted != max_tokens:
        seen.wrong.append(f"stream {index}: {counted} tokens, not {max_tokens}")
    if traced and tokens != expected(prompt, max_tokens, vocab_size):
        seen.wrong.append(f"stream {index}: another text")
    return True


def expected(prompt: Sequence[int], max_tokens: int, vocab_size: int) -> list[int]:
    """The simulated text of a prompt whose end-of-text token is not among the vocabulary of the simulation."""
    request = Request(request_id="", prompt_ids=tuple(prompt), params=SamplingParams())
    return simulated_text(request, 0, max_tokens, vocab_size)


def _take(line: bytes, arrived_ms: float, tokens: list[int], seen: Seen) -> None:
    trace: dict[str, Any] = json.loads(line.removeprefix(b"data: ")).get("seqmtp") or {}
    tokens += trace.get("tokens", ())
    if (committed_at := trace.get("timings_ms", {}).get("committed_at")) is not None:
        seen.emit_ms.append(arrived_ms - committed_at)


def _body(prompt: Sequence[int], max_tokens: int, traced: bool) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "speculation": {"trace": traced},
    }
