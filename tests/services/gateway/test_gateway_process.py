"""The gateway as its own process: it finds a coordinator through the store, chats, survives its loss, and stops."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from seqmtp_serve.errors import NotReady
from seqmtp_serve.request import Request
from services.free_port import free_port
from services.gateway.fake import FakeCoordinator
from services.gateway.main import bind, build_app
from services.gateway.text_model import open_text_model
from services.registry import Registry
from services.rpc.channel import bind as bind_grpc
from services.rpc.channel import new_server
from services.rpc.convert import from_wire, to_wire
from services.rpc.wire import coordinator as messages
from services.rpc.wire import coordinator_rpc
from services.settings import Settings
from services.store.connection import connect
from services.store.embedded import EmbeddedValkey
from tests.patience import PATIENCE_S
from tests.services.gateway.world import CHAT, MESSAGES

MODEL = "smollm2-135m-instruct"


class Served(coordinator_rpc.CoordinatorServicer):
    """A scripted coordinator behind gRPC."""

    def __init__(self, fake: FakeCoordinator) -> None:
        self.fake = fake

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async with contextlib.aclosing(self.fake.generate(from_wire(Request, request.request), {})) as rows:
            async for row in rows:
                yield to_wire(row)

    async def Status(self, request: Any, context: Any) -> Any:
        return messages.StatusReply(
            coordinator_id="c0", model=MODEL, max_model_len=512, max_depth=3, target_ready=True, store_ready=True
        )


@contextlib.asynccontextmanager
async def coordinator(url: str, name: str, fake: FakeCoordinator) -> AsyncIterator[None]:
    """A coordinator that is listed while the block runs."""
    server, redis = new_server(), connect(url, socket_timeout_s=PATIENCE_S)
    coordinator_rpc.add_CoordinatorServicer_to_server(Served(fake), server)
    address = bind_grpc(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with Registry(redis).announce("coordinator", name, address):
            yield
    finally:
        await server.stop(None)
        await redis.aclose()


async def until_status(client: httpx.AsyncClient, code: int) -> dict[str, Any]:
    """/ready's body once it answers so. Raises TimeoutError."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(httpx.TransportError):
                answer = await client.get("/ready")
                if answer.status_code == code:
                    return dict(answer.json())
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_a_process_finds_its_coordinator_and_stops_on_a_signal(tmp_path: Path) -> None:
    text = open_text_model(MODEL)
    says = [text.tokenizer.encode(part).ids for part in ("Hello", ", 😀 wor", "ld!")]
    fake = FakeCoordinator(text.tokenizer, [*says, [text.eos_token_ids[0]]], delay_s=0.02)
    port = free_port()
    with EmbeddedValkey(tmp_path) as store:
        flags = ["--redis-url", store.url, "--port", str(port)]
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "services.gateway", *flags)
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                assert (await until_status(client, 503))["coordinators"] == []
                assert (await client.post(CHAT, json={"messages": MESSAGES})).status_code == 503
                async with coordinator(store.url, "first", fake):
                    assert (await until_status(client, 200))["model"] == MODEL
                    answer = (await client.post(CHAT, json={"messages": MESSAGES})).json()
                    assert answer["choices"][0]["message"]["content"] == "Hello, 😀 world!"
                    stream = await client.post(CHAT, json={"messages": MESSAGES, "stream": True})
                    assert stream.text.endswith("data: [DONE]\n\n")
                    assert (await client.get("/")).status_code == 200
                await until_status(client, 503)
                async with coordinator(store.url, "second", fake):
                    await until_status(client, 200)
                    assert (await client.post(CHAT, json={"messages": MESSAGES})).status_code == 200
        finally:
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                assert await process.wait() == 0


def test_a_taken_port_and_a_missing_store_are_named() -> None:
    with bind("127.0.0.1", 0) as taken, pytest.raises(NotReady, match="Cannot listen on 127"):
        bind("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(NotReady, match="--redis-url"):
        build_app(Settings())


async def test_the_gateway_loads_no_torch() -> None:
    """A gateway holds no tensor; loading the library would cost it seconds and 200 MB."""
    code = "import sys, services.gateway.main; sys.exit('torch' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0
