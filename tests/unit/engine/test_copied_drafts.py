"""A target copies drafts from a request's own text where that repeats itself; whose a draft was changes no token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from seqmtp_serve import oracle
from seqmtp_serve.engine.target import TargetEngine
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.synthetic import TINY
from seqmtp_serve.ports import Draft
from seqmtp_serve.request import Contract, Request
from seqmtp_serve.speculation.prompt_lookup import Copy
from tests.unit.engine.driver import Driver, Stream
from tests.unit.engine.engines import MTP, TARGET, proposer, request, seeded, target
from tests.unit.test_local import engine, generate_all, tokens_of

MAKERS = {"greedy": request, "seeded": seeded}
OUTSIDE = next(  # a token that the module's draft vocabulary lacks
    token
    for token in range(TINY.vocab_size)
    if token not in MTP[f"model.layers.{TINY.num_layers}.draft_token_ids"].tolist()
)


def copying(on: bool) -> TargetEngine:
    return target(proposer(), prompt_lookup=on)


def repeating(each: Request, text: list[int]) -> Request:
    """The same request after a prompt that holds its own answer, twice."""
    return replace(each, prompt_ids=(*each.prompt_ids, *text, *each.prompt_ids, *text, *each.prompt_ids))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("depth", [1, 3])
def test_text_is_the_same_with_copies_and_without(make: object, depth: int) -> None:
    assert callable(make)
    for index in range(4):
        each = make(index, max_tokens=30, ignore_eos=True)
        each = repeating(each, oracle.generate(TARGET, TINY, each)[:12])
        text = oracle.generate(TARGET, TINY, each)
        outputs = [Driver(copying(on), depth=depth).run(each)[0].output for on in (True, False)]
        assert outputs == [text, text]


def begun(driver: Driver, one: Request) -> Stream:
    """After its prompt's pass, at whose end the next round's drafts are found."""
    stream = Stream.open(one)
    driver.step([stream])
    return stream


def test_a_copy_may_hold_what_the_draft_vocabulary_lacks() -> None:
    """The text after the prompt's pass is the prompt and one token: the prompt is made to hold both before."""
    one = repeating(request(max_tokens=8, ignore_eos=True), [3, 1])
    first = oracle.generate(TARGET, TINY, one)[0]
    driver = Driver(copying(True))
    for _ in range(20):  # a longer prompt may choose another token: until it is the one that was put there
        prompt = (*one.prompt_ids, first, OUTSIDE, 4, 2, *one.prompt_ids)
        chosen = oracle.generate(TARGET, TINY, replace(one, prompt_ids=prompt))[0]
        if chosen == first:
            break
        first = chosen
    assert chosen == first
    stream = begun(driver, replace(one, prompt_ids=prompt))
    (sequence,) = driver.target._sequences.values()
    assert sequence.copy is not None
    assert sequence.copy.tokens[:3] == (OUTSIDE, 4, 2)
    assert stream.rows[-1].next_copied == sequence.copy.survivals
    report = driver.step([stream])
    assert report.rows[0].copied
    assert report.rows[0].drafted == 3


def test_the_next_round_drafts_as_many_copies_as_it_is_asked_for() -> None:
    each = request(1, max_tokens=30, ignore_eos=True)
    one = repeating(each, oracle.generate(TARGET, TINY, each)[:12])
    for asked in (0, 1, 3, 6, 8, 9):
        driver = Driver(copying(True))
        stream = begun(driver, one)
        assert len(stream.rows[-1].next_copied) == 8
        assert list(stream.rows[-1].next_copied) == sorted(stream.rows[-1].next_copied, reverse=True)
        driver.depth = asked
        (row,) = driver.step([stream]).rows
        assert (row.drafted, row.copied) == (min(asked, 8), asked > 0)


def test_a_target_that_copies_asks_no_proposer_and_feeds_it_later() -> None:
    """The rows of copied rounds wait; a round of the module then finds every one, and drafts as if it had had them."""
    each = request(1, max_tokens=60, ignore_eos=True)
    one = repeating(each, oracle.generate(TARGET, TINY, each)[:12])
    link = proposer()
    driver = Driver(target(link))
    stream = begun(driver, one)
    after_prompt = driver.target._feeder.num_fed_rows
    assert after_prompt == len(one.prompt_ids)
    while stream.rows[-1].next_copied:
        (row,) = driver.step([stream]).rows
        assert row.copied
        if row.next_copied:
            assert driver.target._feeder.num_fed_rows == after_prompt
    (sequence,) = driver.target._sequences.values()
    known = sequence.known_tokens
    assert driver.target._feeder.num_fed_rows == len(known) - 1
    hidden = oracle.forward(TARGET, TINY, known)[1][: len(known) - 1]
    expected = oracle.draft_greedily(MTP, TINY, MtpConfig(), known, hidden, 3)
    (draft,) = link.collect([sequence.draft_ref], 1.0).values() if sequence.draft_ref else ((),)
    assert isinstance(draft, Draft)
    assert list(draft.tokens) == expected
    link.engine.check()


def test_rows_of_copies_are_fed_when_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqmtp_serve.engine.feeder.DEFERRED_ROWS", 5)
    each = request(1, max_tokens=60, ignore_eos=True)
    one = repeating(each, oracle.generate(TARGET, TINY, each)[:12])
    driver = Driver(target(proposer()))
    stream = begun(driver, one)
    while not stream.done and stream.rows[-1].next_copied:
        driver.step([stream])
        (sequence,) = driver.target._sequences.values()
        assert len(sequence.known_tokens) - 1 - sequence.fed_bases < 5


def test_without_a_proposer_a_text_still_drafts_from_itself() -> None:
    each = request(1, max_tokens=30, ignore_eos=True)
    one = repeating(each, oracle.generate(TARGET, TINY, each)[:12])
    (stream,) = Driver(target(None)).run(one)
    assert stream.output == oracle.generate(TARGET, TINY, one)
    assert sum(row.accepted for row in stream.rows if row.copied) > 0
    plain = replace(one, params=replace(one.params, max_depth=0))
    (stream,) = Driver(target(None)).run(plain)
    assert not any(row.drafted or row.next_copied for row in stream.rows)


def test_under_the_ratio_contract_a_copied_token_is_judged_as_certain() -> None:
    one = replace(request(temperature=0.8, max_tokens=20), prompt_ids=(3, 1, 4, 2, 9) * 4)
    assert one.params.contract is Contract.RATIO
    driver = Driver(copying(True))
    begun(driver, one)
    (sequence,) = driver.target._sequences.values()
    sequence.copy = Copy(tokens=(OUTSIDE, 4), survivals=(0.9, 0.8))
    draft = sequence.copied(2)
    assert draft is not None
    assert draft.draft_probs == (((OUTSIDE, 1.0),), ((4, 1.0),))


def test_copies_keep_the_distribution_under_the_ratio_contract() -> None:
    """First two tokens after a prompt that repeats itself: as often with copies as the model alone draws them."""
    ids = (3, 1, 5, 4, 2, 9, 3, 1, 5, 4, 2, 9)
    trials = 1500
    counts = {}
    for on in (True, False):
        built = copying(on)
        tokens = torch.zeros(2, TINY.vocab_size)
        for seed in range(trials):
            one = replace(request(temperature=1.0, seed=seed, max_tokens=3, ignore_eos=True), prompt_ids=ids)
            output = Driver(built, depth=2).run(replace(one, request_id=f"r{seed}"))[0].output
            for place in (1, 2):  # the first comes from the prompt's pass
                tokens[place - 1, output[place]] += 1
        counts[on] = tokens / trials
    distance = (counts[True] - counts[False]).abs().sum(-1) / 2
    noise = (counts[False] * (1 - counts[False]) * 2 / trials).sqrt().sum(-1) / 2
    assert (distance < 1.6 * noise).all(), (distance, noise)


async def test_the_record_says_which_tokens_were_copied() -> None:
    each = request(1, max_tokens=30, ignore_eos=True)
    one = repeating(each, oracle.generate(TARGET, TINY, each)[:12])
    (rows,), counters = await generate_all(engine(), [one])
    assert tokens_of(rows) == oracle.generate(TARGET, TINY, one)
    origins = "".join(row.origins for row in rows)
    assert origins.count("l") == sum(row.accepted for row in rows if row.copied) == counters["copied.accepted"] > 0
    assert origins.count("a") == sum(row.accepted for row in rows if not row.copied)
    assert counters["copied.rounds"] == sum(row.copied for row in rows)
    assert counters["accepted"] == sum(row.accepted for row in rows)
