"""A request's prediction is a source of drafts: right or wrong, it changes no token, at any depth, with no proposer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seqmtp_serve import oracle
from seqmtp_serve.model.synthetic import TINY
from seqmtp_serve.request import Request
from tests.unit.engine.driver import Driver, Stream
from tests.unit.engine.engines import TARGET, proposer, request, seeded, target
from tests.unit.test_local import engine, generate_all, tokens_of

MAKERS = {"greedy": request, "seeded": seeded}


def edited(text: list[int]) -> tuple[int, ...]:
    """A prediction with one token replaced, some inserted and some left out."""
    return (*text[:8], (text[8] + 1) % TINY.vocab_size, *text[9:14], 3, 1, 4, *text[14:20], *text[24:])


def run(each: Request, depth: int) -> Stream:
    return Driver(target(proposer() if depth else None), depth=depth, predicted=8).run(each)[0]


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_no_prediction_changes_a_token(make: object, depth: int) -> None:
    assert callable(make)
    each = make(1, max_tokens=40, ignore_eos=True)
    text = oracle.generate(TARGET, TINY, each)
    for prediction in (tuple(text), edited(text), tuple(reversed(text)), (0,) * 50, (TINY.vocab_size + 5,)):
        assert run(replace(each, prediction_ids=prediction), depth).output == text


def test_a_right_prediction_is_accepted_whole_and_an_edited_one_mostly() -> None:
    each = request(1, max_tokens=40, ignore_eos=True)
    text = oracle.generate(TARGET, TINY, each)
    rows = run(replace(each, prediction_ids=tuple(text)), depth=0).rows
    rounds = [(row.drafted, row.accepted, row.predicted) for row in rows[1:]]
    assert all(drafted == accepted and predicted for drafted, accepted, predicted in rounds)
    assert len(rounds) == 5  # 39 tokens, 9 a round
    rows = run(replace(each, prediction_ids=edited(text)), depth=0).rows
    assert 20 < sum(row.accepted for row in rows) < sum(row.drafted for row in rows)


@pytest.mark.parametrize("make", [request, seeded, lambda index, **more: request(index, temperature=1.5, **more)])
def test_a_wrong_prediction_gives_way_to_the_proposer(make: object) -> None:
    """Then its drafts are asked for again; under the ratio contract a prediction's q is the token alone."""
    assert callable(make)
    each = make(1, max_tokens=40, ignore_eos=True)
    rows = run(replace(each, prediction_ids=(0,) * 50), depth=3).rows
    assert any(row.drafted and not row.predicted for row in rows)


async def test_the_coordinator_says_which_source_proposed_a_token() -> None:
    each = request(1, max_tokens=40, ignore_eos=True)
    text = oracle.generate(TARGET, TINY, each)
    predicted = replace(each, prediction_ids=edited(text), params=replace(each.params, max_depth=2))
    others = [seeded(2, max_tokens=30), replace(seeded(3), prediction_ids=tuple(reversed(text)))]
    (rows, *rest), counters = await generate_all(engine(), [predicted, *others])
    assert tokens_of(rows) == text
    for one, found in zip(others, rest, strict=True):
        assert tokens_of(found) == oracle.generate(TARGET, TINY, one)
    origins = "".join(row.origins for row in rows)
    assert origins.count("p") == sum(row.accepted for row in rows if row.predicted) > 15
    assert all(("p" in row.origins) <= row.predicted for row in rows)
    assert counters["predicted.accepted"] >= origins.count("p")
    assert counters["outputs"] == counters["bootstraps"] + counters["progress.delivered"]


async def test_a_preempted_prediction_goes_on_where_it_was() -> None:
    each = request(1, max_tokens=40, ignore_eos=True)
    text = oracle.generate(TARGET, TINY, each)
    stream, driver = Stream.open(replace(each, prediction_ids=tuple(text))), Driver(target(None), predicted=4)
    while len(stream.output) < 15:
        driver.step([stream])
    driver.preempt(stream)
    driver.resume([stream])
    assert stream.output == text
    assert all(row.drafted == row.accepted for row in stream.rows)
