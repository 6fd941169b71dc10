"""Streams of rollout tasks: user turns the model writes itself, and turns from the prompt grid."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from seqmtp_serve.training.articles import article_turn
from seqmtp_serve.training.passages import Passage, long_turn
from seqmtp_serve.training.prompt_grid import short_turn
from seqmtp_serve.training.rollout import Ask, Encode, Task

_WARM = (0.6, 0.7, 0.8, 0.9, 1.0)
_GREEDY_SHARE = 0.6


def reply_temperature(rng: random.Random) -> float:
    """0 for 60 % of the replies (as the module will mostly be used), else one of 0.6 to 1.0."""
    return 0.0 if rng.random() < _GREEDY_SHARE else rng.choice(_WARM)


def self_written(seed: int, max_reply: int, encode: Encode | None = None) -> Iterator[Task]:
    """Endless tasks whose user turn the model writes at temperature 1 (Magpie, arXiv 2406.08464)."""
    rng = random.Random(seed)
    while True:
        yield Task(prompt=None, temperature=reply_temperature(rng), max_reply=max_reply)


def from_grid(seed: int, max_reply: int, encode: Encode) -> Iterator[Task]:
    """Endless short user turns from the prompt grid."""
    rng = random.Random(seed)
    while True:
        yield Task(prompt=encode(short_turn(rng)), temperature=reply_temperature(rng), max_reply=max_reply)


def mixed(seed: int, max_reply: int, encode: Encode) -> Iterator[Task]:
    """One self-written turn for every two turns of the grid."""
    own, grid = self_written(seed, max_reply), from_grid(seed, max_reply, encode)
    while True:
        yield from (next(own), next(grid), next(grid))


def long_ones(seed: int, max_reply: int, encode: Encode, pool: Sequence[Passage], max_turn: int) -> Iterator[Task]:
    """Endless summaries and questions over passages; turns of more than ``max_turn`` tokens are passed over."""
    rng = random.Random(seed)
    while True:
        turn = encode(long_turn(rng, pool))
        if len(turn) <= max_turn:
            yield Task(prompt=turn, temperature=reply_temperature(rng), max_reply=max_reply)


def articles(seed: int, max_reply: int, encode: Encode, max_turn: int) -> Iterator[Task]:
    """Endless summaries of, and questions over, news articles the model writes itself (:mod:`articles`)."""
    rng = random.Random(seed)
    while True:
        turn = article_turn(rng)
        asks = (Ask(closing=tuple(encode(text)), temperature=reply_temperature(rng)) for text in turn.closings)
        yield Task(
            prompt=None,
            temperature=0.0,
            max_reply=max_reply,
            opening=tuple(encode(turn.opening)),
            asks=tuple(asks),
            turn_len=rng.randint(max_turn // 4, max_turn * 3 // 4),
            turn_temperature=rng.choice((0.7, 0.8, 0.9)),
        )
