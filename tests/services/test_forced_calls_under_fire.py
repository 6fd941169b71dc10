"""Real processes: a forced call and a structured answer, streamed while target, proposer or coordinator is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from cluster import Cluster, cluster
from jsonschema import validate
from tiny_model import write_tiny_model

from services.free_port import free_port
from services.settings import EngineSettings, GatewaySettings, ModelSettings, SchedulerSettings, Settings
from tests.services.byte_tokenizer import byte_tokenizer
from tests.services.gateway.tools.test_tool_calls import put_together
from tests.services.gateway.world import TEMPLATE

pytestmark = pytest.mark.slow
SCHEMA = {
    "type": "object",
    "properties": {"note": {"type": "string", "pattern": "^[a-z ]{500}$"}, "sure": {"type": "boolean"}},
    "required": ["note", "sure"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "remember", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "remember"}}
ASKED: dict[str, dict[str, Any]] = {
    "required": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0},
    "named": {"tools": [TOOL], "tool_choice": NAMED, "temperature": 0.9, "seed": 4},
    "schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "note", "schema": SCHEMA}},
        "temperature": 0.9,
        "seed": 5,
    },
}
EARLY = 20  # chunks of some seven hundred tokens


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("model")
    model = write_tiny_model(folder, byte_tokenizer())
    template = folder / "template.jinja"
    template.write_text(TEMPLATE + "{% if tools %}{% endif %}")  # which is not told of the tools: a short prompt
    settings = Settings(
        model=ModelSettings(path=str(model), mtp=str(model.parent / "tiny-mtp"), chat_template=template),
        engine=EngineSettings(max_model_len=2000, max_num_seqs=4, weights="fp32"),
        scheduler=SchedulerSettings(reader_grace_s=60.0),
        gateway=GatewaySettings(port=free_port()),
    )
    with cluster(tmp_path_factory.mktemp("service"), settings) as workers:
        workers.start("target", "proposer", "coordinator", "gateway")
        yield workers


async def chunks(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Each chunk of the answer once: where its stream breaks off it is taken up again after the last event."""
    path, last, event_id = "/v1/chat/completions", "", ""
    while True:
        resumed = {"headers": {"Last-Event-ID": last}} if last else {}
        with contextlib.suppress(httpx.HTTPError):
            async with client.stream("POST", path, json=body, **resumed) as answer:
                assert answer.status_code in (200, 503), await answer.aread()
                async for line in answer.aiter_lines():
                    event_id = line.removeprefix("id: ") if line.startswith("id: ") else event_id
                    data = line.removeprefix("data: ") if line.startswith("data: ") else ""
                    if data == "[DONE]":
                        return
                    if data:
                        chunk = json.loads(data)
                        if "error" in chunk:
                            break
                        last = event_id
                        yield chunk
        await asyncio.sleep(0.2)


async def answered(
    client: httpx.AsyncClient, fields: dict[str, Any], fault: Any = None
) -> tuple[str, list[tuple[str, str]], str]:
    """Text, calls and end of a streamed answer; `fault` is called when it has begun."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1500, "stream": True, **fields}
    choices = []
    async for chunk in chunks(client, body):
        choices.append(chunk["choices"][0])
        if len(choices) == EARLY and fault is not None:
            fault()
    assert len(choices) > 3 * EARLY, "it was under way"
    text, calls = put_together([choice["delta"] for choice in choices])
    return text, calls, choices[-1]["finish_reason"]


@pytest.mark.covers(88, 126, 157)
@pytest.mark.parametrize("kind", list(ASKED))
async def test_calls_and_structured_answers_end_whole_whoever_is_killed(service: Cluster, kind: str) -> None:
    await service.ready()
    url = f"http://127.0.0.1:{service.settings.gateway.port}"
    fields = ASKED[kind]
    async with asyncio.timeout(240), httpx.AsyncClient(base_url=url, timeout=60) as client:
        while (await client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.1)
        plain = await answered(client, {**fields, "speculation": {"enabled": False}})
        text, calls, finish = plain
        assert finish == ("stop" if kind == "schema" else "tool_calls")
        (written,) = [text] if kind == "schema" else [arguments for _, arguments in calls]
        validate(json.loads(written), SCHEMA)
        for victim in ("proposer", "target", "coordinator"):

            def kill(victim: str = victim) -> None:
                service.send(victim, signal.SIGKILL)
                service.start(victim)

            assert await answered(client, fields, kill) == plain, victim
            await service.ready()
