"""A client that asks for a long answer and does not read it: the gateway takes no more rows, and serves others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace

import httpx

from seqmtp_serve.request import CommittedRow, Request
from services.gateway.fake import STATUS, FakeCoordinator
from tests.services.gateway.live import serving, until
from tests.services.gateway.world import CHAT, MESSAGES, TOKENIZER, ids

ROW = ids("x" * 64)
NUM_ROWS = 512  # with the log-probabilities some 60 MiB: more than sockets hold


class Counting(FakeCoordinator):
    """Counts the rows that the gateway took."""

    taken = 0

    async def generate(self, request: Request, meta: Mapping[str, str]) -> AsyncGenerator[CommittedRow, None]:
        async with contextlib.aclosing(super().generate(request, meta)) as rows:
            async for row in rows:
                self.taken += 1
                yield row


async def test_rows_wait_for_a_reader_that_does_not_read() -> None:
    room = len(ROW) * NUM_ROWS
    coordinator = Counting(TOKENIZER, [ROW], status=[replace(STATUS, max_model_len=room + 100)])
    asked = {"messages": MESSAGES, "stream": True, "max_tokens": room, "logprobs": True, "top_logprobs": 20}
    body = json.dumps(asked).encode()
    async with serving(coordinator) as url, httpx.AsyncClient(base_url=url) as client:
        host, port = url.removeprefix("http://").split(":")
        with socket.socket() as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            link.setblocking(False)
            await asyncio.get_running_loop().sock_connect(link, (host, int(port)))
            lines = (
                f"POST {CHAT} HTTP/1.1",
                "Host: x",
                "Content-Type: application/json",
                f"Content-Length: {len(body)}",
            )
            head = "\r\n".join(lines) + "\r\n\r\n"
            await asyncio.get_running_loop().sock_sendall(link, head.encode() + body)
            await until(lambda: coordinator.taken)
            before, same = 0, 0
            while same < 30:  # nothing new for a third of a second
                same = same + 1 if coordinator.taken == before else 0
                before = coordinator.taken
                await asyncio.sleep(0.01)
            assert coordinator.taken < NUM_ROWS / 2
            short = {"messages": MESSAGES, "max_tokens": 1}
            assert (await client.post(CHAT, json=short)).status_code == 200
            assert coordinator.open_streams == 1
        await until(lambda: coordinator.open_streams == 0)
