"""A gateway that is asked to end: nothing new, answers go on for a while, and the rest say where to go on from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from services.gateway.choice import Delta
from services.gateway.drain import Drain
from tests.services.gateway.world import CHAT, MESSAGES, app_over, events, fake, script

LONG = script(*"abcdefghij", eos=True)


async def chat(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post(CHAT, json={"messages": MESSAGES, **fields})


def a_gateway(delay_s: float = 0.0) -> tuple[httpx.AsyncClient, Drain, Any]:
    coordinator = fake(LONG, delay_s=delay_s)
    app = app_over(coordinator)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://gateway"), app.state.drain, coordinator


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_draining_gateway_says_so_and_takes_nothing_new() -> None:
    client, drain, coordinator = a_gateway()
    assert (await client.get("/ready")).json()["draining"] is False
    drain.begin()
    ready = await client.get("/ready")
    assert (ready.status_code, ready.json()["ready"], ready.json()["draining"]) == (503, False, True)
    assert (await client.get("/health")).status_code == 200
    refused = await chat(client)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    assert int(refused.headers["Retry-After"]) >= 1
    assert coordinator.requests == []


async def test_answers_under_way_come_to_their_end() -> None:
    client, drain, _ = a_gateway(delay_s=0.01)
    answers = [asyncio.create_task(chat(client, stream=stream)) for stream in (True, False)]
    await until(lambda: drain.num_open == 2)
    drain.begin()
    streamed, whole = await asyncio.gather(*answers)
    assert whole.json()["choices"][0]["message"]["content"] == "abcdefghij"
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert "error" not in streamed.text
    assert drain.all_over()


@pytest.mark.parametrize("stop", [None, "fg"])
async def test_a_stream_that_is_cut_goes_on_elsewhere_from_its_last_id(stop: str | None) -> None:
    client, drain, coordinator = a_gateway(delay_s=0.01)
    cutting = asyncio.create_task(chat(client, stream=True, stop=stop, n=2))
    await until(lambda: drain.num_open == 1 and len(coordinator.requests) == 2)
    await asyncio.sleep(0.04)  # some rows
    drain.begin()
    drain.expire()
    first = events((await cutting).text)
    assert first[-2][1]["error"]["code"] == "draining"
    coordinator.delay_s = 0.0
    elsewhere = httpx.ASGITransport(app_over(coordinator))
    async with httpx.AsyncClient(transport=elsewhere, base_url="http://other") as other:
        job_id, last_id = first[0][1]["id"], first[-2][0]
        rest = await other.get(f"{CHAT}/{job_id}", headers={"Last-Event-ID": last_id or ""})
    texts = ["", ""]
    for _, chunk in [*first[:-2], *events(rest.text)]:
        for choice in chunk["choices"] if chunk != "[DONE]" else ():
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == ["abcdefghij" if stop is None else "abcde"] * 2
    assert drain.num_open == 0


async def test_a_whole_answer_that_is_cut_is_a_503() -> None:
    client, drain, _ = a_gateway(delay_s=0.05)
    cutting = asyncio.create_task(chat(client))
    await until(lambda: drain.num_open == 1)
    drain.begin()
    drain.expire()
    answer = await cutting
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")


async def test_a_timeout_of_the_answer_itself_is_not_the_drains() -> None:
    async def deltas() -> AsyncGenerator[Delta, None]:
        raise TimeoutError("the answer's own")
        yield

    drain = Drain()
    with pytest.raises(TimeoutError, match="the answer's own"):
        await anext(drain.watch(deltas()))
    assert drain.all_over()
