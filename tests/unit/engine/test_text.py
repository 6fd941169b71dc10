"""The text does not depend on how it was computed: drafts, batch, chunks, replay, a replaced proposer."""

from __future__ import annotations

import pytest
from driver import Driver, Stream
from engines import TARGET, proposer, request, seeded, target

from seqmtp_serve import oracle
from seqmtp_serve.model.synthetic import TINY
from seqmtp_serve.ports import StepPlan
from seqmtp_serve.request import Request

MAKERS = {"greedy": request, "seeded": seeded}


def expected(each: Request) -> list[int]:
    return oracle.generate(TARGET, TINY, each)


@pytest.mark.covers(72, 157)
@pytest.mark.parametrize("contract", MAKERS)
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_the_engine_writes_what_the_oracle_writes(contract: str, depth: int) -> None:
    requests = [MAKERS[contract](index) for index in range(4)]
    link = proposer()
    streams = Driver(target(link), depth=depth, chunk=7).run(*requests)
    assert [stream.output for stream in streams] == [expected(each) for each in requests]
    link.engine.check()
    assert not link.refusals
    rows = [row for stream in streams for row in stream.rows]
    accepted, drafted = sum(row.accepted for row in rows), sum(row.drafted for row in rows)
    assert (drafted > 0) == (depth > 0)
    if depth:
        assert 0 < accepted < drafted, "the fixture must accept some drafts and reject some"


@pytest.mark.covers(151)
@pytest.mark.parametrize("weights", ["fp32", "int8"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_depth_and_batch_change_no_token(make: object, weights: str) -> None:
    assert callable(make)
    requests = [make(index, max_tokens=40) for index in range(8)]
    alone = [Driver(target(None, weights=weights), depth=0).run(each)[0].output for each in requests]
    for depth in (1, 3):
        link = proposer(weights=weights)
        together = Driver(target(link, weights=weights), depth=depth, chunk=10).run(*requests)
        assert [stream.output for stream in together] == alone


@pytest.mark.covers(139)
@pytest.mark.parametrize("chunk", [1, 2, 8, 11, 1000])
def test_chunked_prefill_changes_neither_text_nor_drafts(chunk: int) -> None:
    """A row fed with the wrong next token at a chunk boundary would lower the acceptance and nothing else."""
    each = request(2, prompt_len=20)
    whole = Driver(target(proposer())).run(each)[0]
    pieces = Driver(target(proposer()), chunk=chunk).run(each)[0]
    assert pieces.output == whole.output
    assert [(row.drafted, row.accepted) for row in pieces.rows] == [(row.drafted, row.accepted) for row in whole.rows]


@pytest.mark.covers(86, 88, 152)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_preemption_and_replay_change_no_token(make: object) -> None:
    assert callable(make)
    streams = [Stream.open(make(index, max_tokens=30)) for index in range(3)]
    driver = Driver(target(proposer()), chunk=20)
    while not all(stream.done for stream in streams):
        running = [stream for stream in streams if not stream.done]
        driver.step(running)
        if driver.num_steps % 6 == 0:
            driver.preempt(running[driver.num_steps // 6 % len(running)])
    assert [stream.output for stream in streams] == [expected(stream.request) for stream in streams]


@pytest.mark.covers(86)
def test_a_replay_drafts_like_the_original() -> None:
    """After a replay the proposer holds rows for prompt and output alike: acceptance goes on as before."""
    each = request(1, max_tokens=40)
    undisturbed = Driver(target(proposer())).run(each)[0]
    stream, driver = Stream.open(each), Driver(target(proposer()), chunk=9)
    while len(stream.output) < 15:
        driver.step([stream])
    num_rows = len(stream.rows)
    driver.preempt(stream)
    driver.resume([stream])
    assert [row.accepted for row in stream.rows[num_rows:]] == [row.accepted for row in undisturbed.rows[num_rows:]]


@pytest.mark.covers(48, 86)
def test_a_replaced_proposer_costs_drafts_and_no_token() -> None:
    each = request(0, max_tokens=60)
    undisturbed = Driver(target(proposer())).run(each)[0]
    link = proposer()
    stream, driver = Stream.open(each), Driver(target(link))
    while len(stream.output) < 12:
        driver.step([stream])
    link.ready = False
    link.replace(proposer().engine)
    without = [driver.step([stream]).rows[0].drafted for _ in range(3)]
    link.ready = True
    driver.resume([stream])
    assert without == [0, 0, 0]
    assert stream.output == undisturbed.output
    assert stream.rows[-1].drafted + stream.rows[-2].drafted > 0, "it must draft again"
    assert link.refusals == []


@pytest.mark.covers(157)
def test_a_request_that_wants_no_drafts_feeds_nobody() -> None:
    link = proposer()
    stream = Driver(target(link)).run(request(max_depth=0))[0]
    assert stream.output == expected(stream.request)
    assert {row.drafted for row in stream.rows} == {0}
    assert link.engine.propose([], []) == []
    link.engine.check()


@pytest.mark.covers(80)
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_no_draft_is_deeper_than_the_budget(max_tokens: int) -> None:
    stream = Driver(target(proposer())).run(request(max_tokens=max_tokens))[0]
    assert stream.output == expected(stream.request)
    assert all(row.drafted < max_tokens for row in stream.rows)


@pytest.mark.covers(51, 54)
def test_the_context_fills_to_the_last_slot() -> None:
    each = request(prompt_len=20, max_tokens=200, ignore_eos=True)
    link = proposer(max_model_len=48)
    engine = target(link, max_model_len=48)
    stream, driver = Stream.open(each), Driver(engine)
    while len(each.prompt_ids) + len(stream.output) <= 48:
        driver.step([stream])
    assert stream.output == expected(each)[: len(stream.output)]
    assert len(each.prompt_ids) + len(stream.output) == 49  # the last token needs no slot
    driver.preempt(stream)
    assert Driver(engine).run(request(3, prompt_len=10))[0].output == expected(request(3, prompt_len=10))
    engine.step(StepPlan(step_id=0))
    assert not link.refusals
