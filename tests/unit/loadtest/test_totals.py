"""The aggregation: sums that split over workers and add up again, and what is derived from them."""

from __future__ import annotations

import json
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.answer import Answer
from loadtest.latency import Latency
from loadtest.report import goodput_ratio, html_of, result_of, text_of
from loadtest.slo import Objectives
from loadtest.speculation import Speculation
from loadtest.totals import Totals


def answer_of(accepted, cut=0, depth=3, ttft=100.0, gap=20.0):
    """An answer of one first token and a round per entry, the last cut by `cut` tokens; one chunk each."""
    tokens = 1 + sum(number + 1 for number in accepted) - cut
    return Answer(
        chunk_times=[ttft + gap * number for number in range(len(accepted) + 1)],
        usage={"prompt_tokens": 7, "completion_tokens": tokens},
        speculation={
            "acceptance_histogram": [accepted.count(number) for number in range(depth + 1)],
            "num_spec_steps": len(accepted),
            "num_draft_tokens": depth * len(accepted),
            "num_accepted_draft_tokens": sum(accepted),
        },
    )


def totals_of(answers, objectives=Objectives()):
    totals = Totals()
    for second, (answer, category) in enumerate(answers):
        totals.add(answer, category, started=float(second), ended=second + 0.5, objectives=objectives)
    return totals


@pytest.mark.covers(95, 103)
def test_the_three_kinds_of_e_r():
    speculation = Speculation()
    speculation.add(answer_of([3, 0, 2], cut=2))
    speculation.add(answer_of([1]))
    assert speculation.verified == 1 + 6 / 4
    assert speculation.delivered == (8 - 2 + 2) / 4
    assert speculation.seen == speculation.delivered
    assert speculation.acceptance_rate == 6 / 12
    assert speculation.acceptance_by_position == [3 / 4, 2 / 4, 1 / 4]


@pytest.mark.covers(95)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), min_size=1, max_size=8))
def test_positions_sum_to_verified_minus_one(rounds):
    speculation = Speculation()
    for accepted in rounds:
        speculation.add(answer_of(accepted))
    assert sum(speculation.acceptance_by_position) == pytest.approx(speculation.verified - 1)
    assert speculation.delivered == pytest.approx(speculation.verified)  # nothing was cut


def test_a_server_that_tells_nothing_is_still_measured_by_its_chunks():
    speculation = Speculation()
    answer = answer_of([3, 1])
    answer.speculation = None
    speculation.add(answer)
    assert (speculation.verified, speculation.delivered, speculation.acceptance_rate) == (None, None, None)
    assert speculation.seen == 3.0
    assert speculation.acceptance_by_position == []


def test_rounds_without_drafts_do_not_inflate_what_was_delivered():
    """Two rounds with drafts, five of plain decoding while the proposer was away."""
    answer = answer_of([2, 0])
    answer.usage["completion_tokens"] += 5
    speculation = Speculation()
    speculation.add(answer)
    assert (speculation.verified, speculation.delivered) == (2.0, 2.0)


def test_depths_may_differ_between_answers():
    speculation = Speculation()
    speculation.add(answer_of([1], depth=1))
    speculation.add(answer_of([3, 0], depth=3))
    assert speculation.histogram == [1, 1, 0, 1]
    assert speculation.acceptance_by_position == pytest.approx([2 / 3, 1 / 3, 1 / 3])


@given(st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=6), st.sampled_from("abc")), max_size=12), st.randoms())
def test_workers_add_up_over_the_wire(cases, draws):
    answers = [(answer_of(accepted), category) for accepted, category in cases]
    objectives = Objectives.parse("tpot:12")
    alone, merged = Totals(), Totals()
    workers = [Totals() for _ in range(3)]
    for second, (answer, category) in enumerate(answers):
        for totals in (alone, draws.choice(workers)):
            totals.add(answer, category, float(second), second + 0.5, objectives)
    for totals in (alone, draws.choice(workers)):
        totals.add_failure(3.0, 4.0)
        totals.add_lag(5.0)
    for worker in workers:
        merged.merge(Totals.from_message(json.loads(json.dumps(worker.to_message()))))
    assert_same(merged.to_message(), alone.to_message())


def assert_same(left, right):
    """Equal but for the order of float additions and of buckets."""
    for message in (left, right):
        for latency in (*message["latencies"].values(), *(ttft for _, _, _, ttft, _ in message["sendings"])):
            latency["buckets"] = sorted(latency["buckets"])
            latency["total"], latency["square_total"] = (round(latency[key], 6) for key in ("total", "square_total"))
        for each in message["by_category"].values():
            each["histogram"] += [0] * (4 - len(each["histogram"]))
    assert left == right


def test_percentiles_are_within_half_a_percent():
    draws = random.Random(2)
    values = [draws.lognormvariate(4.0, 1.0) for _ in range(5000)]
    latency = Latency()
    for value in values:
        latency.add(value)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for percent in (50, 90, 99):
        assert latency.percentile(percent) == pytest.approx(cuts[percent - 1], rel=0.01)
    assert latency.mean == pytest.approx(statistics.fmean(values))
    assert latency.std == pytest.approx(statistics.pstdev(values))


def test_an_empty_latency_is_zero():
    assert (Latency().mean, Latency().std, Latency().percentile(99)) == (0.0, 0.0, 0.0)


def test_goodput_counts_failures_as_bad():
    fast, slow = answer_of([1], ttft=50.0), answer_of([1], ttft=500.0)
    totals = totals_of([(fast, "a"), (slow, "a")], Objectives.parse("ttft:100 e2el:1000"))
    totals.add_failure(2.0, 2.5)
    assert goodput_ratio(totals) == pytest.approx(1 / 3)
    assert goodput_ratio(Totals()) == 0.0


@pytest.mark.parametrize("text", ["ttft", "itl:5", "ttft:fast"])
def test_objectives_that_make_no_sense_are_refused(text):
    with pytest.raises(ValueError):
        Objectives.parse(text)


def test_the_result_carries_the_names_plotting_scripts_know():
    result = result_of(totals_of([(answer_of([3, 1]), "b"), (answer_of([0]), "a")]), {"model_id": "m"})
    assert result["completed"] == 2
    assert result["duration"] == 1.5
    assert result["output_throughput"] == pytest.approx(9 / 1.5)
    assert result["mean_ttft_ms"] == 100.0
    assert result["spec_decode_acceptance_length"] == pytest.approx(1 + 4 / 3)
    assert list(result["categories"]) == ["a", "b"]
    json.dumps(result, allow_nan=False)
    assert "together" in text_of(result)
    assert "<td>b</td>" in html_of(result)


def test_an_empty_run_still_has_a_result():
    result = result_of(Totals(), {})
    assert result["completed"] == 0
    assert result["output_throughput"] == 0.0
    json.dumps(result, allow_nan=False)
    assert "0 answers" in text_of(result)
