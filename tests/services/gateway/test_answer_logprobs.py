"""Log-probabilities in answers: an entry for each counted token, whole, streamed and resumed; the two forms."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers import Tokenizer, decoders, models

from seqmtp_serve.fake import fake_logprobs
from services.gateway.token_names import TokenNames
from tests.services.gateway.world import CHAT, EOS_ID, MESSAGES, TOKENIZER, events, fake, http, ids, script, strictly

COMPLETIONS = "/v1/completions"
ASKED = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3}
ROWS = script("h", "ello é", " worst", "opped")


async def test_a_whole_chat_answer_has_an_entry_for_every_counted_token() -> None:
    async with http(fake(ROWS)) as client:
        answer = await client.post(CHAT, json=ASKED)
    strictly(ChatCompletion, answer.text)
    body = answer.json()
    content = body["choices"][0]["logprobs"]["content"]
    tokens = [token for row in ROWS for token in row]
    assert len(content) == body["usage"]["completion_tokens"] == len(tokens)
    expected = fake_logprobs(tokens, 3)
    assert [entry["logprob"] for entry in content] == [one.logprob for one in expected]
    assert [[top["logprob"] for top in entry["top_logprobs"]] for entry in content] == [
        list(one.top_logprobs) for one in expected
    ]
    spelled = bytes(byte for entry in content[:-1] for byte in entry["bytes"]).decode()
    assert spelled == body["choices"][0]["message"]["content"] == "hello é worstopped"
    assert content[-1]["token"] == TOKENIZER.id_to_token(EOS_ID)


async def test_none_without_asking_and_no_alternatives_unless_asked() -> None:
    async with http() as client:
        plain = (await client.post(CHAT, json={"messages": MESSAGES})).json()
        chosen = (await client.post(CHAT, json={"messages": MESSAGES, "logprobs": True})).json()
    assert plain["choices"][0]["logprobs"] is None
    assert {len(entry["top_logprobs"]) for entry in chosen["choices"][0]["logprobs"]["content"]} == {0}


@pytest.mark.parametrize("stop", [None, "stop"])
async def test_a_stream_carries_each_rows_entries_with_that_row(stop: str | None) -> None:
    """Also of a row whose text is held back; so a resumed stream has those that the first one lacked."""
    coordinator = fake(ROWS)
    async with http(coordinator) as client:
        whole = (await client.post(CHAT, json={**ASKED, "stop": stop})).json()["choices"][0]
        found = events((await client.post(CHAT, json={**ASKED, "stop": stop, "stream": True})).text)
        id = found[0][1]["id"]
        for cut in range(1, len(found) - 1):
            headers = {"Last-Event-ID": str(found[cut][0])}
            assert events((await client.get(f"{CHAT}/{id}", headers=headers)).text) == found[cut + 1 :]
    chunks = [data for _, data in found[:-1]]
    for chunk in chunks:
        strictly(ChatCompletionChunk, json.dumps(chunk))
    of_rows = [chunk["choices"][0]["logprobs"]["content"] for chunk in chunks[1:-1]]
    rows = coordinator._rows(coordinator.requests[0])
    assert list(map(len, of_rows)) == [len(row.tokens) for row in rows]
    assert list(chain.from_iterable(of_rows)) == whole["logprobs"]["content"]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == whole["message"]["content"]


async def completion(**fields: Any) -> dict[str, Any]:
    async with http(fake(ROWS)) as client:
        answer = await client.post(COMPLETIONS, json={"prompt": "aé<|im_end|>", "max_tokens": 99, **fields})
    assert answer.status_code == 200, answer.text
    if not (fields.get("echo") and "logprobs" in fields):  # OpenAI's types know nothing of the first token's null
        strictly(Completion, answer.text)
    return dict(answer.json()["choices"][0])


async def test_completions_have_their_own_form_with_offsets_into_the_text() -> None:
    choice = await completion(logprobs=2)
    found = choice["logprobs"]
    assert "".join(found["tokens"][:5]) == choice["text"][:5] == "hello"
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        if token.isalpha():
            assert choice["text"][offset : offset + len(token)] == token
    assert found["text_offset"][-1] == len(choice["text"])  # the end-of-text token
    for token, score, tops in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert tops[token] == score or token in list(tops)[:2]
        assert len(tops) <= 3


async def test_echo_gives_the_prompt_and_its_numbers_the_first_of_which_is_null() -> None:
    prompt = "aé<|im_end|>"
    choice = await completion(logprobs=2, echo=True)
    assert choice["text"] == f"{prompt}hello é worstopped"
    found, prompt_ids = choice["logprobs"], ids(prompt)
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    expected = [one.logprob for one in fake_logprobs(prompt_ids[1:], 2)]
    assert found["token_logprobs"][1 : len(prompt_ids)] == expected
    assert len(found["tokens"]) == len(prompt_ids) + sum(map(len, ROWS))
    assert found["text_offset"][len(prompt_ids)] == len(prompt)
    assert "prompt_logprobs" not in choice
    assert (await completion(echo=True))["logprobs"] is None


async def test_prompt_logprobs_are_keyed_by_token_and_hold_the_prompts_own() -> None:
    choice = await completion(prompt_logprobs=1, logprobs=3, echo=True)
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for token, entry in zip(ids("aé<|im_end|>")[1:], others, strict=True):
        (score,) = fake_logprobs([token], 1)
        assert entry[str(token)]["logprob"] == score.logprob
        assert len(entry) <= 2
    assert {len(tops) for tops in choice["logprobs"]["top_logprobs"][1:]} <= {3, 4}


async def test_an_echoed_prompt_is_streamed_first_and_not_again_to_who_resumes() -> None:
    body = {"prompt": "ab", "max_tokens": 99, "echo": True, "logprobs": 1, "stream": True}
    async with http(fake(ROWS)) as client:
        found = events((await client.post(COMPLETIONS, json=body)).text)
        id = found[0][1]["id"]
        again = await client.get(f"{COMPLETIONS}/{id}", headers={"Last-Event-ID": str(found[0][0])})
        partial = (await client.get(f"{COMPLETIONS}/{id}")).json()["choices"][0]
    assert found[0][1]["choices"][0]["text"] == "ab"
    assert found[0][1]["choices"][0]["logprobs"]["token_logprobs"][0] is None
    assert events(again.text) == found[1:]
    assert "".join(data["choices"][0]["text"] for _, data in found[:-1]) == partial["text"]
    lists = [data["choices"][0]["logprobs"] for _, data in found[:-2]]
    for name in partial["logprobs"]:
        assert list(chain.from_iterable(each[name] for each in lists)) == partial["logprobs"][name]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": 1}, "echo"),
        ({"top_logprobs": 1}, "top_logprobs"),
    ],
)
async def test_what_cannot_be_is_400_and_names_its_field(fields: dict[str, Any], param: str) -> None:
    async with http() as client:
        answer = await client.post(COMPLETIONS, json={"prompt": "a", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_parts_of_characters_are_told_apart_and_their_bytes_are_true() -> None:
    names = TokenNames(TOKENIZER)
    parts = [names[token] for token in ids("é")]
    assert [part.text for part in parts] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert b"".join(part.utf8 for part in parts).decode() == "é"
    assert names[EOS_ID].text == "<|im_end|>"
    assert names[10**6].text == ""


def test_sentencepiece_names_have_their_space_and_their_bytes() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"▁the": 0, "<0xE2>": 1, "x": 2}, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    names = TokenNames(tokenizer)
    assert [names[token].utf8 for token in range(3)] == [b" the", b"\xe2", b"x"]
