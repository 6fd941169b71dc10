"""A text of megabytes: the same ids, without the event loop waiting for them, and none at all if it cannot fit."""

from __future__ import annotations

import asyncio
import threading

import pytest

from seqmtp_serve.errors import ContextOverflow
from services.gateway.room import Room
from services.gateway.text_model import LONG_TEXT, MANY_TURNS, TextModel
from tests.services.gateway.world import CHAT, MESSAGES, TEMPLATE, TEXT, TOKENIZER, http

LONG = "word " * LONG_TEXT


@pytest.mark.parametrize("special", [False, True])
async def test_a_long_text_has_the_ids_of_the_plain_form(special: bool) -> None:
    plain = TOKENIZER.encode(LONG, add_special_tokens=special).ids
    assert await TEXT.encode(LONG, add_special_tokens=special) == plain
    assert await TEXT.decode(plain) == TOKENIZER.decode(plain, skip_special_tokens=False)


async def test_a_long_conversation_is_rendered_as_a_short_one_is() -> None:
    assert TEXT.template is not None
    assert TEXT.template.source == TEMPLATE
    turns = [{"role": "user", "content": "hi"}] * (MANY_TURNS + 1)
    whole = await TEXT.encode_chat(turns, add_generation_prompt=False)
    assert whole == (await TEXT.encode_chat(turns[:1], add_generation_prompt=False)) * len(turns)


async def test_the_event_loop_goes_on_meanwhile() -> None:
    """In a thread is not enough: the plain form keeps the interpreter to itself, and leaves the loop a few turns."""
    encoding = asyncio.create_task(TEXT.encode(LONG * 10, add_special_tokens=False))
    num_turns = 0
    while not encoding.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert num_turns > 20


async def test_the_event_loop_goes_on_while_tokens_are_named() -> None:
    loop_went_on = threading.Event()

    class Patient:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

        def id_to_token(self, token: int) -> str | None:
            return "a" if loop_went_on.wait(10) and token == 0 else None

    text = TextModel(tokenizer=Patient(), template=None, eos_token_ids=(), root="")  # type: ignore[arg-type]
    naming = asyncio.create_task(text.names([0, 1]))
    await asyncio.sleep(0.01)
    loop_went_on.set()
    assert await naming == ["a", ""]


async def test_a_text_that_no_tokens_in_the_context_can_spell_is_refused_unread() -> None:
    fits = TEXT.longest_token * 4
    await TEXT.encode("a" * fits, add_special_tokens=False, room=Room(4, "prompt"))
    with pytest.raises(ContextOverflow, match="characters"):
        await TEXT.encode("a" * (fits + 1), add_special_tokens=False, room=Room(4, "prompt"))
    async with http() as client:
        body = {"messages": [*MESSAGES, {"role": "user", "content": LONG * 3}]}
        error = (await client.post(CHAT, json=body)).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
