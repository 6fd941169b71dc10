"""`seqmtp serve` itself, both ways, with a tiny model: the same text, over HTTP, and after a worker's death."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.services.launched import complete, serving, stream, workers
from tests.services.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

REQUEST = {"model": "tiny", "prompt": [5, 9, 3], "max_tokens": 400, "temperature": 0, "ignore_eos": True}


def test_serve_both_ways(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path)
    mtp = ("--mtp", f"{model}-mtp")
    with serving(model, tmp_path / "plain", *mtp, "--no-ray") as (url, launcher):
        plain = complete(url, REQUEST)
        assert plain["usage"]["completion_tokens"] == REQUEST["max_tokens"]
        assert plain["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
        text = plain["choices"][0]["text"]
        (target,) = workers(launcher, "services.target")
        assert stream(url, REQUEST, lambda: os.kill(target, signal.SIGKILL)) == text
    with serving(model, tmp_path / "ray", *mtp) as (url, launcher):
        on_ray = complete(url, REQUEST)
        assert on_ray["choices"][0]["text"] == text
        assert on_ray["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
        (target,) = workers(launcher, "ServeReplica:seqmtp:Target")
        assert stream(url, REQUEST, lambda: os.kill(target, signal.SIGKILL)) == text
