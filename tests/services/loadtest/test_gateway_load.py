"""The load test against our own gateway over scripted rounds: every flag is a request it accepts, and E[R] agrees."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from tests.services.gateway.live import serving
from tests.services.gateway.world import fake, script


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
