"""The prompt grid fills every template, needs no benchmark, and depends on its seed alone."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import torch
from tiny_llama import random_document

from seqmtp_serve.training.articles import article_turn
from seqmtp_serve.training.german_sentences import german_sentence
from seqmtp_serve.training.passages import Passage, long_turn, passages_of
from seqmtp_serve.training.prompt_grid import fill, short_turn
from seqmtp_serve.training.tasks import articles, from_grid, long_ones, self_written
from seqmtp_serve.training.word_lists import word_lists

TEMPLATES = [(kind, text) for kind, texts in word_lists("templates").items() for text in texts]


def test_every_template_and_sentence_fills() -> None:
    for _, template in [*TEMPLATES, *(("sentence", text) for text in word_lists("fields")["SENTENCES"])]:
        turn = fill(template, random.Random(1))
        assert turn.strip()
        assert not re.search(r"[{}]", turn), template


def test_turns_vary_and_repeat_with_the_seed() -> None:
    def turns(seed: int) -> list[str]:
        rng = random.Random(seed)
        return [short_turn(rng) for _ in range(300)]

    assert turns(1) == turns(1)
    assert len(set(turns(1))) > 280
    assert max(len(turn) for turn in turns(2)) < 700


def test_articles_fill_vary_and_ask_three_things() -> None:
    turns = [article_turn(random.Random(seed)) for seed in range(300)]
    assert turns == [article_turn(random.Random(seed)) for seed in range(300)]
    assert len({turn.opening for turn in turns}) > 280
    assert not any(re.search(r"[{}]", turn.opening) for turn in turns)
    assert {len(turn.closings) for turn in turns} == {3}
    assert sum(turn.opening.startswith("Summarize: ") or turn.closings[0] in words_end() for turn in turns) / 300 > 0.5

    def encode(text: str) -> list[int]:
        return text.split()  # type: ignore[return-value]

    tasks = [next(articles(seed, 50, encode, max_turn=400)) for seed in range(50)]
    assert all(task.prompt is None and 100 <= task.turn_len <= 300 and len(task.asks) == 3 for task in tasks)


def words_end() -> tuple[str, ...]:
    return word_lists("articles")["end"]


@pytest.mark.parametrize("seed", range(5))
def test_german_sentences_are_sentences(seed: int) -> None:
    sentence = german_sentence(random.Random(seed))
    assert sentence[0].isupper()
    assert sentence[-1] in ".?"
    assert "  " not in sentence


def test_replies_are_mostly_greedy() -> None:
    stream = self_written(3, 50)
    temperatures = [next(stream).temperature for _ in range(2000)]
    assert 0.55 < sum(t == 0 for t in temperatures) / 2000 < 0.65
    assert {t for t in temperatures if t} == {0.6, 0.7, 0.8, 0.9, 1.0}


def test_tasks_carry_the_encoded_turn() -> None:
    def encode(text: str) -> list[int]:
        return [len(text)]

    rng_turn = short_turn_of_task(4)
    assert next(from_grid(4, 50, encode)).prompt == [len(rng_turn)]
    pool = [Passage(question=f"Q{i}?", text=f"word{i} " * 80) for i in range(8)]
    stream = long_ones(4, 50, lambda text: list(range(len(text.split()))), pool, max_turn=200)
    assert all(len(next(stream).prompt or []) <= 200 for _ in range(20))


def short_turn_of_task(seed: int) -> str:
    return short_turn(random.Random(seed))


def test_passages_are_long_replies_without_code() -> None:
    texts = {0: "too short", 1: "plain " * 80, 2: "```code``` " * 80}

    def decode(ids: list[int]) -> str:
        return texts[ids[0]] if len(ids) > 1 else f"question {ids[0]}"

    documents = [
        replace(random_document(8, 5, seed=0), tokens=torch.tensor([50, 50, 7 + kind, 51, 51, kind, kind, 0]))
        for kind in texts
    ]
    found = passages_of(documents, decode, prefix_len=2, suffix_len=2)
    assert [passage.question for passage in found] == ["question 8"]
    turn = long_turn(random.Random(0), found * 6)
    assert "plain plain" in turn
