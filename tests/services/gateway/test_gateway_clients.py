"""Through a socket: OpenAI's own client, sync and async, and clients that leave."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest

from seqmtp_serve.errors import NotReady, Overloaded
from tests.services.gateway.live import serving, until
from tests.services.gateway.world import CHAT, MESSAGES, fake, ids, script

EXTRA = {"speculation": {"max_depth": 2}, "top_k": 5, "min_p": 0.1}


async def test_the_async_client_reads_whole_answers_streams_and_models() -> None:
    async with serving(fake()) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
        whole = await client.chat.completions.create(model="fake", messages=MESSAGES, extra_body=EXTRA)
        assert whole.choices[0].message.content == "hello world"
        text, usage = "", None
        stream = await client.chat.completions.create(
            model="fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            usage = chunk.usage or usage
        assert text == "hello world"
        assert usage is not None
        assert usage.completion_tokens == 7
        assert [model.id async for model in await client.models.list()] == ["fake"]
        completion = await client.completions.create(model="fake", prompt="a", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in completion]) == "hello world"
        async with client.chat.completions.stream(model="fake", messages=MESSAGES) as helper:
            assert (await helper.get_final_completion()).choices[0].message.content == "hello world"


async def test_the_sync_client_gets_typed_errors() -> None:
    def talk(url: str) -> None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            assert client.chat.completions.create(model="fake", messages=MESSAGES).choices[0].finish_reason == "stop"
            with pytest.raises(openai.BadRequestError) as bad:
                client.chat.completions.create(model="fake", messages=MESSAGES, web_search_options={})
            assert bad.value.param == "web_search_options"
            with pytest.raises(openai.NotFoundError) as missing:
                client.chat.completions.create(model="other", messages=MESSAGES)
            assert missing.value.code == "model_not_found"

    async with serving(fake()) as url:
        await asyncio.to_thread(talk, url)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", [Overloaded("full", retry_after_s=2.5), NotReady("no target")])
async def test_a_refusal_is_a_status_before_any_stream_began(stream: bool, error: Exception) -> None:
    coordinator = fake(error=error)
    async with serving(coordinator) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.post(CHAT, json={"messages": MESSAGES, "stream": stream, "n": 2})
    assert answer.status_code == 503
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["retry-after"] == ("3" if isinstance(error, Overloaded) else "1")
    assert answer.headers["x-should-retry"] == "true"
    assert coordinator.open_streams == 0


async def test_a_client_that_retries_gets_its_answer_once_there_is_room() -> None:
    coordinator = fake(error=Overloaded("full", retry_after_s=0.1))

    async def make_room() -> None:
        await until(lambda: len(coordinator.requests) == 1)
        coordinator.error = None

    async with serving(coordinator) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
        room = asyncio.create_task(make_room())
        answer = await client.chat.completions.create(model="fake", messages=MESSAGES)
        await room
    assert answer.choices[0].message.content == "hello world"
    assert len(coordinator.requests) == 2


async def test_an_error_inside_a_stream_is_an_event_then_done() -> None:
    coordinator = fake(error=Overloaded("lost"), error_at=2)
    async with serving(coordinator) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
        raw = await httpx.AsyncClient(base_url=url).post(CHAT, json={"messages": MESSAGES, "stream": True})
        assert raw.status_code == 200
        *_, error, done = raw.text.strip().split("\n\n")
        assert '"error":{"message":"lost","type":"overloaded"' in error
        assert done.endswith("data: [DONE]")
        stream = await client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="lost"):
            async for _ in stream:
                pass
    assert coordinator.open_streams == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("delay_s", [0.02, 30.0])
async def test_a_client_that_leaves_stops_the_reading(stream: bool, delay_s: float) -> None:
    """Whether it leaves while rows come or while the first is awaited."""
    endless = fake([ids("a")], delay_s=delay_s)
    async with serving(endless) as url:
        async with httpx.AsyncClient(base_url=url) as client:
            body = {"messages": MESSAGES, "stream": stream, "ignore_eos": True, "max_tokens": 2000}
            asking = asyncio.create_task(client.post(CHAT, json=body))
            await until(lambda: endless.open_streams == 1)
            await asyncio.sleep(0.1)
            asking.cancel()
        await until(lambda: endless.open_streams == 0)


async def test_leaving_one_stream_leaves_the_others_alone() -> None:
    coordinator = fake(script(*"abcdefgh"), delay_s=0.03)
    async with serving(coordinator) as url, httpx.AsyncClient(base_url=url) as client:
        body = {"messages": MESSAGES, "stream": True}
        staying = asyncio.create_task(client.post(CHAT, json=body))
        leaving = asyncio.create_task(client.post(CHAT, json=body))
        await until(lambda: coordinator.open_streams == 2)
        leaving.cancel()
        answer = await staying
    assert answer.text.rstrip().endswith("data: [DONE]")
    assert '"finish_reason":"stop"' in answer.text
