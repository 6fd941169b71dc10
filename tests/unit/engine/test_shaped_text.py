"""Shaped text: whatever a request does to its rows, drafts, replays and neighbours change no token of it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from driver import Driver, Stream
from engines import TARGET, proposer, request, seeded, target

from seqmtp_serve import oracle
from seqmtp_serve.errors import NoTokenLeft
from seqmtp_serve.model.synthetic import TINY
from seqmtp_serve.request import Request, Shaping
from seqmtp_serve.speculation import draft
from tests.unit.speculation.test_shaping import random_shaping

NUM_REQUESTS = 16


def shaped(draws: random.Random, index: int) -> Request:
    """A random combination of fields, greedy or seeded."""
    plain = draws.choice([request, seeded])(index % 4, max_tokens=16, min_tokens=draws.choice([0, 0, 6]))
    plain = replace(plain, request_id=f"r{index}")
    shaping = random_shaping(draws, TINY.vocab_size, scale=6.0)
    if shaping.logit_bias and draws.random() < 0.5:  # of tokens that do come
        pairs = {token: draws.uniform(-6, 6) for token in oracle.generate(TARGET, TINY, plain)[:6]}
        shaping = replace(shaping, logit_bias=tuple(pairs.items()))
    return replace(plain, params=replace(plain.params, shaping=shaping))


@pytest.mark.covers(68, 72, 157)
def test_random_combinations_of_fields_are_the_oracles_text_at_every_depth() -> None:
    draws = random.Random(11)
    requests = [shaped(draws, index) for index in range(NUM_REQUESTS)]
    expected = [oracle.generate(TARGET, TINY, each) for each in requests]
    unshaped = [oracle.generate(TARGET, TINY, replace(r, params=replace(r.params, shaping=None))) for r in requests]
    assert sum(a != b for a, b in zip(expected, unshaped, strict=True)) > NUM_REQUESTS // 2
    for depth in range(4):
        streams = Driver(target(proposer(num_pages=400), num_pages=400), depth=depth, chunk=9).run(*requests)
        assert [stream.output for stream in streams] == expected
        accepted = sum(row.accepted for stream in streams for row in stream.rows)
        assert (accepted > 10) == (depth > 0)


@pytest.mark.covers(86, 88)
def test_a_replay_knows_the_penalties_of_what_was_committed() -> None:
    draws = random.Random(3)
    streams = [Stream.open(shaped(draws, index)) for index in range(4)]
    driver = Driver(target(proposer()), chunk=20)
    while not all(stream.done for stream in streams):
        running = [stream for stream in streams if not stream.done]
        driver.step(running)
        if driver.num_steps % 3 == 0:
            driver.preempt(running[driver.num_steps // 3 % len(running)])
    assert [stream.output for stream in streams] == [oracle.generate(TARGET, TINY, each.request) for each in streams]


def test_a_bad_word_of_two_tokens_never_comes_though_both_may() -> None:
    plain = oracle.generate(TARGET, TINY, request(0))
    word = (plain[5], plain[6])
    base = request(0)
    each = replace(base, params=replace(base.params, shaping=Shaping(bad_words=(word,))))
    output = Driver(target(proposer())).run(each)[0].output
    assert output[:6] == plain[:6]
    assert word not in set(pairwise(output))


def test_a_request_that_leaves_itself_no_token_ends_and_its_neighbour_does_not() -> None:
    base = request(0, min_tokens=4)
    eos = base.eos_token_ids[0]
    each = replace(base, request_id="bad", params=replace(base.params, shaping=Shaping(allowed_token_ids=(eos,))))
    bad, good = Stream.open(each), Stream.open(request(1))
    driver = Driver(target(proposer()))
    driver.step([bad, good])
    assert [(row.ref.request_id, row.error) for row in driver.refused] == [("bad", NoTokenLeft.code)]
    driver.refused.clear()
    driver.resume([good])
    assert good.output == oracle.generate(TARGET, TINY, request(1))


def test_drafts_follow_whitelist_and_bias_so_they_are_still_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the module proposes what may not come, and every round ends at its first draft."""
    bans = tuple(token for token in range(TINY.vocab_size) if token % 3)
    base = [request(index, max_tokens=30) for index in range(4)]
    shapings = [
        Shaping(allowed_token_ids=bans),
        Shaping(logit_bias=tuple((token, -100.0) for token in range(0, 96, 3))),
    ]
    requests = [
        replace(each, params=replace(each.params, shaping=shapings[index % 2])) for index, each in enumerate(base)
    ]

    def accepted() -> int:
        streams = Driver(target(proposer())).run(*requests)
        assert [stream.output for stream in streams] == [oracle.generate(TARGET, TINY, each) for each in requests]
        return sum(row.accepted for stream in streams for row in stream.rows)

    following = accepted()
    monkeypatch.setattr(draft, "lightly_shaped", lambda logits, shapings, ids: logits)
    assert following > accepted()
