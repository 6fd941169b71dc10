"""`seqmtp bench scale` on real processes with a simulated target: every token arrives, and the name says what it is."""

from __future__ import annotations

import pytest

from seqmtp_serve.simulated import SimulatedCosts
from services.bench.scale import ROLES, ScaleWorkload, measure_scale
from services.bench.table import as_table

pytestmark = pytest.mark.slow


async def test_streams_are_whole_and_each_process_is_accounted_for() -> None:
    costs = SimulatedCosts(step_ms=1.0, draft_ms=0.1)
    report = await measure_scale(
        "smollm2-135m-instruct", ScaleWorkload(streams=(8,), batch=4, max_tokens=48, costs=costs)
    )
    (run,) = report["scale"]
    assert report["model"] == "simulated"
    assert (run["wrong"], run["tokens"]) == ([], 8 * 48)
    assert run["cpu_us_a_token"].keys() == run["kib_a_stream"].keys() == set(ROLES)
    assert run["emit_delay_ms"]["p50"] > 0
    assert run["rounds_only_steps"] > 0
    assert run["hidden_share"] <= 1
    assert "8 streams" in as_table(report)
