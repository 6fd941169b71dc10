"""When a service is as it was before a spike: by hand on made-up requests, and whatever worker counted them."""

from __future__ import annotations

import csv
import io
import json

import pytest

from loadtest.recovery import Sendings, recovery
from loadtest.report import csv_of, html_of, result_of, text_of
from loadtest.totals import Totals
from tests.unit.loadtest.test_totals import answer_of

BEGIN, END = 1000.0, 1010.0


def sendings(after, *, calm_ms=100.0, spike_ms=3000.0, good=True) -> Sendings:
    """Two requests a second for ten seconds, twenty a second in the spike, and `after`: (seconds, TTFT) of the rest."""
    made = Sendings()
    sent = [(BEGIN - 10 + number / 2, calm_ms, good) for number in range(20)]
    sent += [(BEGIN + number / 20, spike_ms, False) for number in range(200)]
    sent += [(END + at, ttft, good) for at, ttft in after]
    for started, ttft, is_good in sent:
        made.at(started).add(answer_of([1], ttft=ttft), is_good, started)
    return made


def slow_for(seconds, *, ttft=2000.0):
    return [(number / 2, ttft if number / 2 < seconds else 100.0) for number in range(60)]


@pytest.mark.parametrize("seconds", [0, 1, 4, 9.5])
def test_it_is_the_first_moment_from_which_on_all_is_as_before(seconds):
    found = recovery(sendings(slow_for(seconds)), (BEGIN, END))
    # one in twenty may be slow, before and after: of sixty less the slow ones, that is two slots of half a second
    assert found["ttft_s"] == pytest.approx(max(seconds - 1.0, 0.0))
    assert found["backlog_s"] == pytest.approx(3.0 - 1 / 20)  # the last was sent 1/20 s before the end
    assert found["recovered_s"] == max(found["ttft_s"], found["backlog_s"])
    assert (found["before"]["requests"], found["during"]["requests"], found["after"]["requests"]) == (20, 200, 60)
    assert found["during"]["p95_ttft_ms"] == pytest.approx(3000, rel=0.01)


def test_a_relapse_counts_from_its_end():
    relapse = [(at, 2000.0 if 10 <= at < 14 else 100.0) for at in (number / 2 for number in range(60))]
    assert recovery(sendings(relapse), (BEGIN, END))["ttft_s"] >= 13


def test_what_is_never_as_before_has_no_time():
    never = sendings([(number / 2, 200.0) for number in range(60)])
    found = recovery(never, (BEGIN, END))
    assert (found["ttft_s"], found["recovered_s"]) == (None, None)
    assert "not within the run" in text_of(result_of(Totals(sendings=never), {}, (BEGIN, END)))
    few = recovery(sendings(slow_for(0)[:9]), (BEGIN, END))
    assert few["recovered_s"] is None, "nine answers say nothing"


def test_answers_that_are_fast_but_not_good_are_not_as_before():
    made = sendings(slow_for(0))
    for number in range(10):
        made.at(END + 20).add_failure(END + 20 + number)
    found = recovery(made, (BEGIN, END))
    assert found["ttft_s"] >= 20
    assert found["after"]["failed"] == 10


def test_a_refused_request_of_the_spike_waits_until_it_is_refused():
    made = sendings(slow_for(0), spike_ms=100.0)
    made.at(END - 1).add_failure(END + 7.5)
    assert recovery(made, (BEGIN, END))["backlog_s"] == 7.5


def test_slices_in_which_the_spike_begins_and_ends_are_its_own():
    made = sendings(slow_for(0))
    found = recovery(made, (BEGIN + 0.1, END - 0.1))
    assert found["during"]["requests"] == 200
    assert found["after"]["requests"] == 60
    assert found["backlog_s"] == pytest.approx(3.05)


def test_the_report_has_it_as_columns_whatever_worker_counted():
    made = sendings(slow_for(4))
    mine, theirs = Totals(), Totals()
    for number, (slot, each) in enumerate(sorted(made.slices.items())):
        (mine if number % 2 else theirs).sendings.slices[slot] = each
    mine.merge(Totals.from_message(json.loads(json.dumps(theirs.to_message()))))
    result = result_of(mine, {"model_id": "m"}, (BEGIN, END))
    assert result["recovery"] == recovery(made, (BEGIN, END))
    (row,) = csv.DictReader(io.StringIO(csv_of(result)))
    assert float(row["recovery.recovered_s"]) == 3.0
    assert float(row["recovery.before.p95_ttft_ms"]) == result["recovery"]["before"]["p95_ttft_ms"]
    assert row["model_id"] == "m"
    assert "as before 3.0 s after its end" in html_of(result)
    assert "Recovery" not in html_of(result_of(mine, {}))
