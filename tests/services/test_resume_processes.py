"""Real processes: a client that goes on at another gateway while coordinators and gateways are killed under it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cluster import Cluster, cluster
from tiny_model import write_tiny_model

from services.free_port import free_port
from services.settings import EngineSettings, GatewaySettings, ModelSettings, SchedulerSettings, Settings

pytestmark = pytest.mark.slow
BODY = {"prompt": [5, 6, 7, 8, 9], "seed": 4, "temperature": 0.9, "ignore_eos": True, "max_tokens": 400}


@pytest.fixture(scope="module")
def two_gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Cluster]]:
    """All roles; and beside them a second gateway, a process of its own."""
    model = write_tiny_model(tmp_path_factory.mktemp("model"))
    settings = Settings(
        model=ModelSettings(path=str(model), mtp=str(model.parent / "tiny-mtp")),
        engine=EngineSettings(max_model_len=2000, max_num_seqs=4, weights="fp32"),
        scheduler=SchedulerSettings(reader_grace_s=20.0),
        gateway=GatewaySettings(port=free_port()),
    )
    with cluster(tmp_path_factory.mktemp("first"), settings) as first:
        other = first.settings.model_copy(update={"gateway": GatewaySettings(port=free_port())})
        folder: Path = tmp_path_factory.mktemp("second")
        second = Cluster(folder, other)
        try:
            first.start("target", "proposer", "coordinator", "gateway")
            second.start("gateway")
            yield first, second
        finally:
            second.stop()


def url(workers: Cluster) -> str:
    return f"http://127.0.0.1:{workers.settings.gateway.port}/v1/completions"


async def served(*gateways: Cluster) -> None:
    async with asyncio.timeout(90), httpx.AsyncClient() as client:
        for gateway in gateways:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    ready = url(gateway).replace("/v1/completions", "/ready")
                    if (await client.get(ready, timeout=5)).status_code == 200:
                        break
                await asyncio.sleep(0.1)


async def read(response: httpx.Response, blocks: list[str], enough: int | None = None) -> None:
    """Append whole events, until there are `enough`."""
    text = ""
    async for part in response.aiter_text():
        *found, text = (text + part).split("\n\n")
        blocks += found
        if enough is not None and len(blocks) >= enough:
            return


def last_id(blocks: list[str]) -> str:
    return blocks[-1].split("\n")[0].removeprefix("id: ")


@pytest.mark.covers(88, 126)
async def test_a_stream_survives_its_gateway_and_its_coordinator(two_gateways: tuple[Cluster, Cluster]) -> None:
    first, second = two_gateways
    await first.ready()
    await served(first, second)
    timeout = httpx.Timeout(60.0)
    async with httpx.AsyncClient(timeout=timeout) as client:
        body = BODY | {"stream": True, "stream_options": {"include_usage": True}}
        whole: list[str] = []
        async with client.stream("POST", url(second), json=body) as response:
            await read(response, whole)
        seen: list[str] = []
        key = {"Idempotency-Key": "survivor"}
        async with client.stream("POST", url(first), json=body, headers=key) as response:
            await read(response, seen, 5)
            first.send("gateway", signal.SIGKILL)
        first.send("coordinator", signal.SIGKILL)
        first.start("coordinator", "gateway")
        answer = seen[0].split("\n")[0].removeprefix("id: ").split(":")[0]
        async with asyncio.timeout(120):
            while True:  # 503 until the new coordinator is found
                headers = {"Last-Event-ID": last_id(seen)}
                async with client.stream("GET", f"{url(second)}/{answer}", headers=headers) as response:
                    if response.status_code == 200:
                        await read(response, seen)
                        break
                    assert response.status_code == 503, await response.aread()
                await asyncio.sleep(0.2)
        assert texts(seen) == texts(whole)
        assert seen[-1].endswith("data: [DONE]")
        await served(first)
        again = await client.post(url(first), json=body, headers=key)
        assert texts(blocks_of(again.text)) == texts(whole)
        assert last_id(blocks_of(again.text)) == last_id(seen)


def blocks_of(text: str) -> list[str]:
    return text.removesuffix("\n\n").split("\n\n")


def texts(blocks: list[str]) -> str:
    """The text of all chunks, and how it ended: what may differ between two answers is their names and their rows."""
    found = [json.loads(block.split("data: ", 1)[1]) for block in blocks[:-1]]
    assert not [chunk for chunk in found if "error" in chunk]
    choices = [chunk["choices"][0] for chunk in found if chunk["choices"]]
    assert [choice["finish_reason"] for choice in choices][-1] == "length"
    assert found[-1]["usage"]["completion_tokens"] == BODY["max_tokens"]
    return "".join(choice["text"] for choice in choices)
