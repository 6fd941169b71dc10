"""The load test against our own gateway over scripted rounds: every flag is a request it accepts, and E[R] agrees."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from services.store.embedded import EmbeddedValkey
from tests.services.gateway.live import serving
from tests.services.gateway.world import fake, script
from tests.services.test_monitoring import service


@pytest.mark.slow
@pytest.mark.covers(95)
@pytest.mark.parametrize("flags", [(), ("--endpoint", "completions", "--ignore-eos", "--depth", "3")])
async def test_the_stream_confirms_what_the_gateway_counts(tmp_path, flags):
    async with serving(fake(script("A", "BC", "DEFG", "HIJ", "KLM", eos=False))) as url:
        load = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "loadtest.run", "--host", url, "--results", str(tmp_path)),
            *("-u", "2", "-t", "2s", "--max-tokens", "11", "--temperature", "0.8", "--sampling-seed", "5", *flags),
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await load.communicate()
    result = json.loads((tmp_path / "load.json").read_text())
    assert load.returncode == 0, errors.decode()
    assert result["completed"] > 0
    assert result["total_output_tokens"] == 11 * result["completed"]
    assert result["spec_decode_num_drafts"] == 4 * result["completed"]  # rounds; the first row is the bootstrap
    assert result["e_r"]["delivered"] == result["e_r"]["seen"] == 10 / 4
    assert result["e_r"]["verified"] == 12 / 4  # "KLM" was cut to "K"


@pytest.mark.slow
@pytest.mark.covers(95, 103, 110)
async def test_what_the_stream_the_answer_and_metrics_say_of_e_r_is_one_number(tmp_path):
    """Real coordinator and store, the toy target: rounds as it counts them, chunks as a client sees them, /metrics."""
    with EmbeddedValkey(tmp_path / "valkey") as valkey:
        async with service(valkey) as url:
            load = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "loadtest.run", "--host", url, "--results", str(tmp_path)),
                *("-u", "2", "-t", "3s", "--max-tokens", "60", "--ignore-eos", "--temperature", "0.8"),
                stderr=asyncio.subprocess.PIPE,
            )
            _, errors = await load.communicate()
    result = json.loads((tmp_path / "load.json").read_text())
    assert load.returncode == 0, errors.decode()
    assert result["completed"] > 0
    e_r = result["e_r"]
    assert 1.1 < e_r["verified"] < 4
    assert e_r["metrics"] == pytest.approx(e_r["verified"], rel=0.03)  # which also counts answers that the run cut off
    assert e_r["seen"] == pytest.approx(e_r["delivered"], rel=0.02)  # a round without drafts is a chunk, and no round
    share = e_r["delivered"] / e_r["verified"]  # the budget cuts the last round of an answer
    assert 0.94 < share <= 1 + 1e-9, "nothing was cut: two sums, equal but for their rounding"
