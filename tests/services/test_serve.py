"""`seqmtp serve` itself, both ways, with a tiny model: the same text, over HTTP, and after a worker's death."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.banner import probe
from tests.services.free_port import free_port
from tests.services.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

REQUEST = {"model": "tiny", "prompt": [5, 9, 3], "max_tokens": 400, "temperature": 0, "ignore_eos": True}
START_WITHIN_S = 120.0


@contextlib.contextmanager
def serving(model: Path, data_dir: Path, *flags: str) -> Iterator[tuple[str, psutil.Process]]:
    """URL and launcher of a service that is ready; on leaving, Ctrl-C must end all of it."""
    port = free_port()
    data_dir.mkdir()
    own = ["--port", str(port), "--data-dir", str(data_dir), "--mtp", f"{model}-mtp", "--served-model-name", "tiny"]
    log = data_dir / "launcher.log"
    with log.open("w") as out:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "serve", str(model), *own, *flags],
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    url, seen = f"http://127.0.0.1:{port}", psutil.Process(launcher.pid)
    try:
        give_up_at = time.monotonic() + START_WITHIN_S
        while not probe(url).mtp_ready:
            assert launcher.poll() is None, log.read_text()
            assert time.monotonic() < give_up_at, log.read_text()
            time.sleep(0.2)
        yield url, seen
        family = seen.children(recursive=True)
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(60) == 0
        assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    finally:
        if launcher.poll() is None:
            launcher.kill()
            launcher.wait()


def complete(url: str) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(REQUEST).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        answer: dict[str, Any] = json.load(reply)
    return answer


def stream(url: str, meanwhile: Any) -> str:
    """The streamed text; `meanwhile` is called once, after the first piece."""
    body = json.dumps(REQUEST | {"stream": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    pieces: list[str] = []
    with urllib.request.urlopen(request, timeout=120) as reply:
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            pieces += [choice["text"] for choice in json.loads(line[6:])["choices"]]
            if len(pieces) == 1:
                meanwhile()
    return "".join(pieces)


def worker(launcher: psutil.Process, word: str) -> int:
    """Process id of the one worker whose command line holds `word`."""
    (found,) = [one.pid for one in launcher.children(recursive=True) if word in " ".join(one.cmdline())]
    return found


def test_serve_both_ways(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path)
    with serving(model, tmp_path / "plain", "--no-ray") as (url, launcher):
        plain = complete(url)
        assert plain["usage"]["completion_tokens"] == REQUEST["max_tokens"]
        assert plain["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
        text = plain["choices"][0]["text"]
        assert stream(url, lambda: os.kill(worker(launcher, "services.target"), signal.SIGKILL)) == text
    with serving(model, tmp_path / "ray") as (url, launcher):
        on_ray = complete(url)
        assert on_ray["choices"][0]["text"] == text
        assert on_ray["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
        assert stream(url, lambda: os.kill(worker(launcher, "ServeReplica:seqmtp:Target"), signal.SIGKILL)) == text
