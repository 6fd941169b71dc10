"""Reading one stream: which chunks count, when, and which streams are broken."""

from __future__ import annotations

import json
import random

import pytest

from loadtest.answer import Answer, StreamFault
from loadtest.arrivals import PoissonArrivals
from loadtest.levels import ramp_level, steps_level
from loadtest.prompts import BUILT_IN, Prompt, endless, read_prompts


def event(chunk):
    return b"id: r:1\r\ndata: " + json.dumps(chunk).encode() + b"\n\n"


def delta(content, finish=None):
    return event({"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": finish}]})


USAGE = event({"choices": [], "usage": {"completion_tokens": 7}, "metrics": {"speculative_decoding": {"k": 1}}})
DONE = b"data: [DONE]\n\n"


def read(*events):
    answer = Answer()
    for number, each in enumerate(events):
        answer.feed(each, 10.0 * number)
    return answer


def test_role_finish_and_usage_chunks_are_no_tokens():
    answer = read(delta(""), delta("a"), b": ping\n\n", delta("bcd"), delta("efg"), delta(None, "stop"), USAGE, DONE)
    answer.check()
    assert answer.text == "abcdefg"
    assert (answer.ttft_ms, answer.e2e_ms) == (10.0, 40.0)
    assert answer.icl_ms == [20.0, 10.0]
    assert answer.tpot_ms == 30.0 / 6
    assert answer.speculation == {"k": 1}


def test_a_completion_stream_reads_the_same():
    answer = read(event({"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}), USAGE, DONE)
    answer.check()
    assert answer.text == "a"
    assert answer.tpot_ms is None  # one chunk: no time per further token
    assert answer.icl_ms == []


def test_done_ends_the_stream():
    answer = Answer()
    assert answer.feed(delta("a"), 1.0)
    assert not answer.feed(DONE, 2.0)


@pytest.mark.parametrize(
    ("events", "missing"),
    [
        ((delta("a", "stop"), USAGE), "DONE"),
        ((delta("a"), USAGE, DONE), "finish reason"),
        ((delta("a", "stop"), DONE), "usage"),
    ],
)
def test_a_stream_cut_short_is_a_fault(events, missing):
    with pytest.raises(StreamFault, match=missing):
        read(*events).check()


def test_error_events_and_garbage_are_faults():
    with pytest.raises(StreamFault, match="overloaded: try later"):
        read(event({"error": {"code": "overloaded", "message": "try later"}}))
    with pytest.raises(StreamFault, match="not JSON"):
        read(b"data: {nope\n\n")


def test_both_shapes_of_prompts_are_read(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "hello there"}\n\n{"category": "qa", "turns": ["one", "two"]}\n')
    assert read_prompts(path, max_chars=5) == [
        Prompt(turns=("hello",)),
        Prompt(turns=("one", "two"), category="qa"),
    ]
    assert read_prompts(path)[0].turns == ("hello there",)


@pytest.mark.parametrize("line", ["{}", "[]", "nonsense", '{"turns": []}', '{"prompt": 5}', ""])
def test_other_lines_are_refused(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match="prompts"):
        read_prompts(path)


def test_the_built_in_prompts_cover_several_categories():
    prompts = read_prompts(BUILT_IN)
    assert len({prompt.category for prompt in prompts}) >= 6
    assert len(set(prompts)) == len(prompts) >= 20


def test_prompts_come_round_evenly():
    prompts = [Prompt(turns=(text,)) for text in "abcde"]
    source = endless(prompts, seed=1)
    for _ in range(3):
        assert {next(source) for _ in prompts} == set(prompts)


def test_poisson_arrivals_keep_their_rate_and_report_lag():
    arrivals = PoissonArrivals(50.0, random.Random(3), now=0.0)
    now = 0.0
    for _ in range(5000):
        wait, late = arrivals.next_wait(now)
        assert late == 0.0 or wait == 0.0
        now += wait
    assert 5000 / now == pytest.approx(50.0, rel=0.06)
    assert arrivals.next_wait(now + 9.0)[1] > 8.0


@pytest.mark.parametrize(("time", "users"), [(0, 1), (19, 1), (20, 2), (45, 4), (65, 6), (80, None)])
def test_steps_double_up_to_the_maximum(time, users):
    assert steps_level(time, 20.0, 6) == users


@pytest.mark.parametrize(("time", "users"), [(0, 1), (20, 2), (59, 3), (60, None)])
def test_a_ramp_adds_one_at_a_time(time, users):
    assert ramp_level(time, 20.0, 3) == users
