"""Fields that shape the target's rows reach the coordinator as one value, or are refused."""

from __future__ import annotations

from typing import Any

import pytest

from seqmtp_serve.errors import NoTokenLeft
from seqmtp_serve.request import CommittedRow, FinishReason, Request, Shaping
from services.gateway.shaping_fields import word_ids
from tests.services.gateway.world import CHAT, MESSAGES, TOKENIZER, fake, http, ids, script


async def shaping_for(path: str = CHAT, **fields: Any) -> Shaping | None:
    coordinator = fake()
    asked = {"messages": MESSAGES} if path == CHAT else {"prompt": "a"}
    async with http(coordinator) as client:
        answer = await client.post(path, json={**asked, **fields})
    assert answer.status_code == 200, answer.text
    return coordinator.requests[0].params.shaping


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_every_field_arrives(path: str) -> None:
    shaping = await shaping_for(
        path,
        frequency_penalty=0.5,
        presence_penalty=-1,
        repetition_penalty=1.2,
        logit_bias={"7": 3, "5": -100.5, "9": 0, "6": 1000},
        allowed_token_ids=[9, 5, 5],
        bad_words=["stop"],
    )
    (stop,) = word_ids(["stop"], TOKENIZER)
    assert shaping == Shaping(
        frequency_penalty=0.5,
        presence_penalty=-1.0,
        repetition_penalty=1.2,
        logit_bias=((5, -100.0), (6, 100.0), (7, 3.0)),
        allowed_token_ids=(5, 9),
        bad_words=(stop,),
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {}, "bad_words": []},
        dict.fromkeys(("frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words")),
        {"logit_bias": {"5": 0}},
    ],
)
async def test_what_asks_for_nothing_costs_nothing(fields: dict[str, Any]) -> None:
    assert await shaping_for(**fields) is None


def test_a_bad_word_is_banned_at_the_beginning_and_after_a_space() -> None:
    """`Ġ1` is one token as `1` is, so both forms count; `stop` with a space before it is two tokens, not one."""
    assert word_ids(["1"], TOKENIZER) == (tuple(ids("1")), tuple(ids(" 1")))
    assert word_ids([" 1", "1"], TOKENIZER) == (tuple(ids("1")), tuple(ids(" 1")))
    assert word_ids(["stop"], TOKENIZER) == (tuple(ids("stop")),)
    assert len(ids(" stop")) == 2


async def test_the_fields_are_part_of_what_an_idempotency_key_stands_for() -> None:
    async with http(fake(script("a"))) as client:
        headers = {"Idempotency-Key": "k"}
        first = await client.post(CHAT, json={"messages": MESSAGES, "presence_penalty": 1}, headers=headers)
        second = await client.post(CHAT, json={"messages": MESSAGES, "presence_penalty": 1.5}, headers=headers)
    assert (first.status_code, second.status_code) == (200, 409)


async def test_a_request_that_left_itself_no_token_is_a_400() -> None:
    coordinator = fake()

    def rows(request: Request) -> Any:
        yield CommittedRow(
            request_id=request.request_id, version=1, tokens=(), finish=FinishReason.ERROR, stop_reason=NoTokenLeft.code
        )

    coordinator._rows = rows  # type: ignore[method-assign]
    async with http(coordinator) as client:
        for stream in (False, True):
            answer = await client.post(CHAT, json={"messages": MESSAGES, "stream": stream})
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == NoTokenLeft.code
