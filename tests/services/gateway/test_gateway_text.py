"""The text that is shown: the same however tokens were grouped into rows, and never past its end."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmtp_serve.errors import InternalError, RequestCancelled
from seqmtp_serve.request import CommittedRow, FinishReason, Request, SamplingParams
from services.gateway.choice import ChoiceText, Delta, merge, read_choice
from services.gateway.fake import FakeCoordinator
from tests.services.gateway.world import CHAT, EOS_ID, MESSAGES, TOKENIZER, fake, http, ids, script, streamed


def request(**params: Any) -> Request:
    """A request whose prompt is one letter."""
    budget = {"max_tokens": 64, **params}
    return Request(request_id="r", prompt_ids=tuple(ids("p")), params=SamplingParams(**budget), eos_token_ids=(EOS_ID,))


def read(coordinator: FakeCoordinator, index: int = 0, **params: Any) -> AsyncGenerator[Delta, None]:
    """The deltas of one choice of a coordinator's."""
    wanted = request(**params)
    return read_choice(coordinator.generate(wanted, {}), ChoiceText(wanted, TOKENIZER), index)


async def shown(rows: list[list[int]], **params: Any) -> tuple[str, list[Delta]]:
    """What a reader is shown of a scripted generation."""
    stream = read_choice(
        FakeCoordinator(TOKENIZER, rows).generate(request(**params), {}), ChoiceText(request(**params), TOKENIZER), 0
    )
    deltas = [delta async for delta in stream]
    return "".join(delta.text for delta in deltas), deltas


def plain(tokens: list[int], stops: tuple[str, ...], include: bool, max_tokens: int) -> tuple[str, str]:
    """The oracle: decode everything anew after each token and look where the text ends."""
    for count in range(1, len(tokens) + 1):
        if tokens[count - 1] == EOS_ID:
            return TOKENIZER.decode(tokens[: count - 1]), "stop"
        text = TOKENIZER.decode(tokens[:count]).rstrip("\ufffd")
        hits = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        if hits:
            end, start = min(hits)
            return text[: end if include else start], "stop"
        if count == max_tokens:
            return TOKENIZER.decode(tokens[:count]), "length"
    raise AssertionError("the oracle needs an end")


PIECES = st.sampled_from(["a", "b", "ab", "😀", "é", " hello", " world", "stop", "日本"])


@settings(max_examples=60)
@given(
    text=st.lists(PIECES, min_size=1, max_size=12).map("".join),
    cuts=st.lists(st.integers(1, 4), min_size=1, max_size=20),
    stops=st.lists(st.sampled_from(["ab", "ba", "b😀", "stop", "lo w", "本", "a"]), max_size=2, unique=True).map(tuple),
    include=st.booleans(),
    budget=st.integers(1, 40),
)
async def test_any_grouping_of_tokens_shows_the_oracles_text(
    text: str, cuts: list[int], stops: tuple[str, ...], include: bool, budget: int
) -> None:
    tokens = [*ids(text), EOS_ID]
    rows, start = [], 0
    while start < len(tokens):
        size = cuts[len(rows) % len(cuts)]
        rows.append(tokens[start : start + size])
        start += size
    expected, reason = plain(tokens, stops, include, budget)
    got, deltas = await shown(rows, stop=stops, include_stop_str_in_output=include, max_tokens=budget)
    assert got == expected
    assert deltas[-1].row.finish == reason


async def test_a_split_character_waits_for_its_last_byte() -> None:
    emoji = ids("😀")
    async with http(fake([emoji[:1], emoji[1:3], emoji[3:] + ids("!"), [EOS_ID]])) as client:
        found = await streamed(client)
    texts = [data["choices"][0]["delta"].get("content") for _, data in found[:-1]]
    assert texts == ["", "😀!", None]  # role, one chunk for three rows, finish: no empty chunk between


async def test_a_character_that_never_ended_is_shown_as_replacement() -> None:
    async with http(fake([ids("a"), ids("😀")[:2]])) as client:
        body = (await client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 3})).json()
    assert body["choices"][0]["message"]["content"] == TOKENIZER.decode(ids("a") + ids("😀")[:2])
    assert "\ufffd" in body["choices"][0]["message"]["content"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_across_rows_is_never_shown_in_part(stream: bool) -> None:
    rows = script("say S", "T", "O", "P and more")
    async with http(fake(rows)) as client:
        if stream:
            found = await streamed(client, stop=["STOP"])
            text = "".join(data["choices"][0]["delta"].get("content", "") for _, data in found[:-1])
            last = found[-2][1]["choices"][0]
        else:
            last = (await client.post(CHAT, json={"messages": MESSAGES, "stop": "STOP"})).json()["choices"][0]
            text = last["message"]["content"]
    assert text == "say "
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "STOP")


async def test_tokens_after_the_stop_in_its_row_are_neither_shown_nor_counted() -> None:
    row = ids("xSTOPyyy")
    async with http(fake([ids("a"), row])) as client:
        body = (await client.post(CHAT, json={"messages": MESSAGES, "stop": ["STOP"]})).json()
    cut = next(count for count in range(len(row) + 1) if "STOP" in TOKENIZER.decode(row[:count]))
    assert body["choices"][0]["message"]["content"] == "ax"
    assert body["usage"]["completion_tokens"] == 1 + cut


async def test_a_stop_token_id_ends_the_text_and_is_named() -> None:
    (letter,) = ids("b")
    async with http(fake(script("a", "bc"))) as client:
        body = (await client.post(CHAT, json={"messages": MESSAGES, "stop_token_ids": [letter]})).json()
        kept = (
            await client.post(
                CHAT,
                json={"messages": MESSAGES, "stop_token_ids": [letter], "include_stop_str_in_output": True},
            )
        ).json()
    assert body["choices"][0]["message"]["content"] == "a"
    assert body["choices"][0]["stop_reason"] == letter
    assert kept["choices"][0]["message"]["content"] == "ab"


def test_a_row_that_ends_elsewhere_than_its_text_is_an_error_of_ours() -> None:
    text = ChoiceText(request(), TOKENIZER)
    with pytest.raises(InternalError):
        text.push(CommittedRow(request_id="r", version=1, tokens=(EOS_ID,), finish=None))
    other = ChoiceText(request(), TOKENIZER)
    with pytest.raises(InternalError):
        other.push(CommittedRow(request_id="r", version=1, tokens=tuple(ids("a")), finish=FinishReason.STOP))


async def test_merged_choices_keep_their_order_and_one_failure_ends_all() -> None:
    good = FakeCoordinator(TOKENIZER, script("h", "ello"))
    bad = FakeCoordinator(TOKENIZER, script("h", "ello"), error=InternalError("broken"), error_at=2)
    both = merge([read(one, index) for index, one in enumerate((good, good))])
    versions = [(delta.index, delta.row.version) async for delta in both]
    assert sorted(versions) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert [version for index, version in versions if index == 0] == [1, 2]
    mixed = merge([read(one, index) for index, one in enumerate((good, bad))])
    with pytest.raises(InternalError, match="broken"):
        async for _ in mixed:
            pass
    assert (good.open_streams, bad.open_streams) == (0, 0)


async def test_a_reader_that_leaves_closes_every_stream() -> None:
    slow = FakeCoordinator(TOKENIZER, [ids("a")], delay_s=0.01)
    both = merge([read(slow, index) for index in (0, 1)])
    await anext(both)
    assert slow.open_streams == 2
    await both.aclose()
    assert slow.open_streams == 0


@pytest.mark.parametrize("finish", [FinishReason.ERROR, FinishReason.CANCELLED])
async def test_a_generation_ended_from_outside_is_an_error_not_a_finish(finish: FinishReason) -> None:
    class Ended(FakeCoordinator):
        async def generate(self, request: Request, meta: Any) -> Any:
            yield CommittedRow(request_id="r", version=1, tokens=tuple(ids("a")))
            yield CommittedRow(request_id="r", version=2, tokens=(), finish=finish)

    error = RequestCancelled if finish is FinishReason.CANCELLED else InternalError
    with pytest.raises(error, match=finish.value):
        async for _ in read(Ended(TOKENIZER, [])):
            pass
