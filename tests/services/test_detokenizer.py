"""The pieces of an output join to the tokenizer's own decoding of it, whatever was cut where."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer

from services.detokenizer import Detokenizer
from tests.services.byte_tokenizer import byte_tokenizer

TEXTS = [
    "plain words",
    " a space first",
    "naïve café",
    "😀😀 split bytes",
    "日本語の文",
    "a\n\n  b\tc",
    "<|im_end|>",
    "",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_whole_decoding(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    prompt = tokenizer.encode("A prompt.").ids
    detokenize = Detokenizer(tokenizer, prompt)
    assert "".join(map(detokenize, ids)) + detokenize.flush() == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_character_comes_whole_with_its_last_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀").ids
    detokenize = Detokenizer(tokenizer)
    assert [detokenize(token) for token in ids] == [""] * (len(ids) - 1) + ["😀"]
    assert len(ids) == 4


def test_an_unfinished_character_is_shown_as_such_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok😀").ids[:-1]
    detokenize = Detokenizer(tokenizer)
    assert "".join(map(detokenize, ids)) == "ok"
    assert detokenize.flush() == tokenizer.decode(ids)[2:]
    assert detokenize.flush() == ""


def test_any_ids_even_nonsense_and_out_of_range_never_raise(tokenizer: Tokenizer) -> None:
    draw = random.Random(7)
    size = tokenizer.get_vocab_size()
    for _ in range(50):
        ids = [draw.randrange(size + 3) for _ in range(30)]
        detokenize = Detokenizer(tokenizer, ids[:7])
        shown = "".join(map(detokenize, ids[7:])) + detokenize.flush()
        assert isinstance(shown, str)


def test_a_stream_that_rejects_its_prefix_is_replaced_and_reading_goes_on(tokenizer: Tokenizer) -> None:
    emoji = tokenizer.encode("😀").ids
    ids = emoji[2:] + tokenizer.encode(" then text").ids
    detokenize = Detokenizer(tokenizer, emoji[:2])  # the prompt ends inside a character
    assert "".join(map(detokenize, ids)).endswith(" then text")
