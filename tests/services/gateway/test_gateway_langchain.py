"""LangChain's OpenAI class, as its users set it up: whole answers, streams, usage, batches."""

from __future__ import annotations

from langchain_openai import ChatOpenAI

from tests.services.gateway.live import serving
from tests.services.gateway.world import fake


def model(url: str, **more: object) -> ChatOpenAI:
    return ChatOpenAI(model="fake", base_url=f"{url}/v1", api_key="none", max_retries=0, **more)  # type: ignore[arg-type]


async def test_answers_streams_and_batches_read_as_openais() -> None:
    async with serving(fake()) as url:
        whole = await model(url, temperature=0).ainvoke("hi")
        assert whole.content == "hello world"
        assert whole.usage_metadata is not None
        assert whole.usage_metadata["output_tokens"] == 7
        assert whole.response_metadata["finish_reason"] == "stop"

        pieces = [piece async for piece in model(url, stream_usage=True, seed=7).astream("hi")]
        joined = pieces[0]
        for piece in pieces[1:]:
            joined += piece
        assert joined.content == "hello world"
        assert joined.usage_metadata is not None
        assert joined.usage_metadata["output_tokens"] == 7

        batch = await model(url).abatch(["a", "b", "c"])
        assert [answer.content for answer in batch] == ["hello world"] * 3
