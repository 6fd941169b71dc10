"""Load shapes, the timeline, the server's own counters, and what a comparison shows."""

from __future__ import annotations

import pytest

from loadtest.compare import table
from loadtest.levels import SOAK_STEPS, ramp_level, soak_level, spike_level, steps_level
from loadtest.server_counters import acceptance_length, parse_counters
from loadtest.timeline import Timeline
from tests.unit.loadtest.test_totals import answer_of


def test_levels_over_time():
    def levels(shape, users):
        return [shape(step * 10 + 5, 10, users) for step in range(6)]

    assert levels(steps_level, 6) == [1, 2, 4, 6, None, None]
    assert levels(ramp_level, 3) == [1, 2, 3, None, None, None]
    assert levels(spike_level, 40) == [4, 40, 4, None, None, None]
    assert levels(spike_level, 5) == [1, 5, 1, None, None, None]
    assert levels(soak_level, 3) == [3] * 6
    assert soak_level(SOAK_STEPS * 10, 10, 3) is None


@pytest.mark.covers(95)
def test_slices_add_up_over_workers_and_empty_ones_are_shown():
    one, other = Timeline(), Timeline()
    one.at(100.2).add(answer_of([3, 0]), True)
    other.at(100.9).add(answer_of([1]), False)
    other.at(103.0).num_failed += 1
    one.merge(Timeline.from_message(other.to_message()))
    rows = one.rows()
    assert [row["at_s"] for row in rows] == [0.0, 1.0, 2.0, 3.0]
    assert (rows[0]["answers"], rows[0]["good"], rows[0]["e_r_verified"]) == (2, 1, 1 + 4 / 3)
    assert rows[0]["output_throughput"] == 6 + 3
    assert (rows[1]["answers"], rows[1]["mean_ttft_ms"], rows[1]["e_r_verified"]) == (0, None, None)
    assert rows[3]["failed"] == 1
    assert Timeline().rows() == []


METRICS = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="a",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="b",model_name="m"} 5
vllm:spec_decode_num_drafts_created{engine="a"} 1.7e+09
vllm:spec_decode_num_accepted_tokens_total{engine="a",model_name="m"} 1.2e+01
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="a",position="1"} 4.0
vllm:generation_tokens_total 9
"""


def test_the_servers_own_word():
    found = parse_counters(METRICS)
    assert found == {"drafts": 15.0, "accepted_tokens": 12.0, "accepted_tokens_per_pos.1": 4.0}
    assert acceptance_length({"drafts": 5.0, "accepted_tokens": 2.0}, found) == 2.0
    assert acceptance_length(found, found) is None
    assert acceptance_length(None, found) is None


def test_ratios_are_those_of_b_over_a_where_there_are_any():
    rows = {
        label: values for label, *values in table({"output_throughput": 4.0}, {"output_throughput": 6.0, "failed": 1})
    }
    assert rows["output tokens/s"] == [4.0, 6.0, 1.5]
    assert rows["failed"] == [None, 1, None]
