"""A directive that does not fit the state it meets is refused in its own row, and changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from driver import Driver, Stream
from engines import proposer, request, target

from seqmtp_serve import errors
from seqmtp_serve.engine.target import TargetEngine
from seqmtp_serve.frontier.ancestry import initial_digest
from seqmtp_serve.model.synthetic import TINY
from seqmtp_serve.ports import Admit, Draft, Prefill, Publish, Release, StepPlan, Verify
from seqmtp_serve.request import Ref


def running(tokens: int = 6) -> tuple[TargetEngine, Driver, Stream]:
    """A stream in the middle of its text, its last row published."""
    engine = target(proposer())
    driver, stream = Driver(engine), Stream.open(request(max_tokens=40))
    while len(stream.output) < tokens:
        driver.step([stream])
    assert stream.publish is not None
    assert engine.step(StepPlan(step_id=0, publish=(stream.publish,))).rows == ()
    stream.publish = None
    return engine, driver, stream


def only_error(engine: TargetEngine, **directives: object) -> str | None:
    (row,) = engine.step(StepPlan(step_id=9, **directives)).rows  # type: ignore[arg-type]
    assert row.tokens == ()
    engine.check()
    return row.error


@pytest.mark.covers(85, 130)
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"epoch": 0}, errors.Fenced),
        ({"epoch": 2}, errors.StaleVersion),
        ({"version": 1}, errors.StaleVersion),
        ({"digest": bytes(16)}, errors.AncestryMismatch),
        ({"request_id": "nobody"}, errors.RequestNotFound),
    ],
    ids=["old epoch", "unknown epoch", "version", "digest", "request"],
)
def test_another_state_is_refused_and_the_text_goes_on(
    change: dict[str, object], error: type[errors.SeqMTPError]
) -> None:
    engine, driver, stream = running()
    wrong = replace(stream.ref, **change)  # type: ignore[arg-type]
    assert only_error(engine, verify=(Verify(ref=wrong, depth=3),)) == error.code
    assert only_error(engine, publish=(Publish(ref=wrong, keep=1),)) == error.code
    assert only_error(engine, prefill=(Prefill(ref=wrong, start=0, stop=4, last=False),)) == error.code
    driver.resume([stream])
    assert stream.output == Driver(target(None), depth=0).run(stream.request)[0].output


@pytest.mark.parametrize("token", [TINY.vocab_size, 0xFFFFFFFF, -1])
def test_a_token_outside_the_vocabulary_is_not_admitted_and_nobody_else_pays(token: int) -> None:
    engine, driver, stream = running()
    wrong = replace(request(1), prompt_ids=(1, token, 2))
    ref = replace(stream.ref, request_id=wrong.request_id, version=0, digest=initial_digest((1,)))
    assert only_error(engine, admit=(Admit(ref=ref, request=wrong),)) == errors.InvalidField.code
    wrong = replace(wrong, prompt_ids=(1, 2))
    assert only_error(engine, admit=(Admit(ref=ref, request=wrong, output_ids=(token,)),)) == errors.InvalidField.code
    driver.resume([stream])
    assert stream.output == Driver(target(None), depth=0).run(stream.request)[0].output


@pytest.mark.covers(78, 87, 124)
def test_a_row_must_be_committed_before_the_next_round() -> None:
    engine, driver, stream = running()
    verify = Verify(ref=stream.ref, depth=3)
    (row,) = engine.step(StepPlan(step_id=1, verify=(verify,))).rows
    stream.commit(row)
    assert only_error(engine, verify=(verify,)) == errors.IllegalTransition.code
    assert only_error(engine, publish=(replace(stream.publish, keep=row.accepted + 2),)) == "illegal_transition"
    assert engine.step(StepPlan(step_id=2, publish=(stream.publish,))).rows == ()
    assert only_error(engine, publish=(stream.publish,)) == errors.IllegalTransition.code
    stream.publish = None
    driver.resume([stream])


def test_one_request_runs_once_a_pass() -> None:
    engine, _, stream = running()
    verify = Verify(ref=stream.ref, depth=0)
    rows = engine.step(StepPlan(step_id=1, verify=(verify, verify))).rows
    assert [row.error for row in rows] == [errors.IllegalTransition.code, None]


def test_prefill_must_follow_and_end_where_it_says() -> None:
    engine, each = target(None), request(prompt_len=10)
    ref = Ref(request_id=each.request_id, epoch=1, version=0, digest=initial_digest(each.prompt_ids))
    engine.step(StepPlan(step_id=0, admit=(Admit(ref=ref, request=each),)))
    for start, stop, last in ((1, 4, False), (0, 0, False), (0, 11, True), (0, 10, False), (0, 5, True)):
        prefill = Prefill(ref=ref, start=start, stop=stop, last=last)
        assert only_error(engine, prefill=(prefill,)) == errors.IllegalTransition.code
    assert only_error(engine, verify=(Verify(ref=ref, depth=1),)) == errors.IllegalTransition.code
    (row,) = engine.step(StepPlan(step_id=1, prefill=(Prefill(ref=ref, start=0, stop=10, last=True),))).rows
    assert len(row.tokens) == 1


@pytest.mark.covers(85)
def test_a_newer_epoch_takes_over_and_an_older_one_cannot() -> None:
    engine, _, stream = running()
    newer = replace(stream.ref, epoch=2)
    admit = Admit(ref=newer, request=stream.request, output_ids=tuple(stream.output))
    assert only_error(engine, admit=(replace(admit, ref=stream.ref),)) == errors.IllegalTransition.code
    assert engine.step(StepPlan(step_id=1, admit=(admit,))).rows == ()
    assert only_error(engine, admit=(replace(admit, ref=stream.ref),)) == errors.Fenced.code
    assert only_error(engine, verify=(Verify(ref=stream.ref, depth=1),)) == errors.Fenced.code
    engine.step(StepPlan(step_id=2, release=(Release(request_id="r0", epoch=1),)))
    assert only_error(engine, verify=(Verify(ref=newer, depth=1),)) == errors.IllegalTransition.code, "not released"


def test_full_pages_refuse_and_later_admit() -> None:
    engine = target(None, num_pages=8)
    first, second = (Stream.open(request(index, prompt_len=30)) for index in range(2))
    driver = Driver(engine, depth=0)
    driver.step([first])
    free = engine.step(StepPlan(step_id=0)).free_pages
    admit = Admit(ref=second.ref, request=second.request)
    assert only_error(engine, admit=(admit,)) == errors.Overloaded.code
    assert engine.step(StepPlan(step_id=0)).free_pages == free
    driver.resume([first])
    assert engine.step(StepPlan(step_id=0)).free_pages == 8
    driver.resume([second])


def test_a_round_without_pages_is_refused_and_can_be_tried_again() -> None:
    engine = target(None, num_pages=8)
    streams = [Stream.open(request(index, prompt_len=16 - 3 * index, max_tokens=40)) for index in range(2)]
    driver = Driver(engine, depth=0)
    while not driver.refused:
        driver.step(streams)
    assert {row.error for row in driver.refused} == {errors.Overloaded.code}
    driver.refused.clear()
    driver.preempt(streams[1])
    driver.resume(streams[:1])
    assert streams[0].output == Driver(target(None), depth=0).run(streams[0].request)[0].output


def test_the_batch_is_bounded_and_prompts_fit_the_context() -> None:
    engine = target(None, max_batch=1, max_model_len=32)
    streams = [Stream.open(request(index)) for index in range(2)]
    admits = tuple(Admit(ref=stream.ref, request=stream.request) for stream in streams)
    (row,) = engine.step(StepPlan(step_id=0, admit=admits)).rows
    assert (row.ref.request_id, row.error) == ("r1", errors.Overloaded.code)
    long = Stream.open(request(5, prompt_len=40))
    assert only_error(engine, admit=(Admit(ref=long.ref, request=long.request),)) == errors.ContextOverflow.code
    engine.step(StepPlan(step_id=0, release=(Release(request_id="unknown", epoch=1),)))


@pytest.mark.covers(53, 70)
@pytest.mark.parametrize("tokens", [(-1, 2), (96,), (5, 1000)], ids=str)
def test_a_draft_outside_the_vocabulary_is_never_verified(tokens: tuple[int, ...]) -> None:
    engine, _, stream = running()
    link = engine._feeder._proposer
    assert link is not None
    link._drafts["r0"] = Draft(ref=stream.ref, tokens=tokens)
    (row,) = engine.step(StepPlan(step_id=1, verify=(Verify(ref=stream.ref, depth=3),))).rows
    assert (row.error, row.drafted, len(row.tokens)) == (None, 0, 1)
    assert engine._feeder.num_refused_drafts == 1


@pytest.mark.covers(85, 86)
def test_a_draft_of_another_ancestry_is_never_verified() -> None:
    engine, _, stream = running()
    link = engine._feeder._proposer
    assert link is not None
    stale = Draft(ref=replace(stream.ref, digest=bytes(16)), tokens=(1, 2, 3))
    link.collect = lambda refs, timeout_s: {"r0": stale}  # a peer that breaks its own contract
    (row,) = engine.step(StepPlan(step_id=1, verify=(Verify(ref=stream.ref, depth=3),))).rows
    assert (row.error, row.drafted, len(row.tokens)) == (None, 0, 1)


def test_a_sequence_that_is_not_finite_ends_and_leaves_clean_pages() -> None:
    engine = target(None, num_pages=6)
    good, bad = Stream.open(request(0)), Stream.open(request(1))
    driver = Driver(engine, depth=0)
    driver.step([good, bad])
    lease = engine._sequences["r1"].lease
    slots = engine._cache.pool.slots(lease, 0, 4)
    engine._cache.kv_LSE[0, slots, -4:] = float("nan")
    report = engine.step(
        StepPlan(
            step_id=1,
            publish=(good.publish, bad.publish),
            verify=tuple(Verify(ref=each.ref, depth=0) for each in (good, bad)),
        )
    )
    outcome = {row.ref.request_id: row for row in report.rows}
    assert outcome["r1"].error == errors.InternalError.code
    good.commit(outcome["r0"])
    engine.check()
    assert bool(torch.isfinite(engine._cache.kv_LSE).all())
    driver.resume([good])
    assert good.output == Driver(target(None), depth=0).run(good.request)[0].output
