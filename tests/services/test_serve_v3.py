"""`seqmtp serve PATH` of a folder in the released DeepSeek-V3 layout, as processes, over HTTP: with its module, and
with a module that was damaged after it was sealed.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seqmtp_serve.checkpoint import names
from seqmtp_serve.checkpoint.mtp_manifest import write_mtp_manifest
from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.checkpoint.seal import sealed
from services.banner import probe
from services.free_port import free_port
from tests.unit.released_files import LAYER, write_tiny_v3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FLAGS = ("--no-ray", "--weights", "fp32", "--max-model-len", "256", "--max-num-seqs", "4")
REQUEST = {"model": "v3", "prompt": [5, 9, 3], "max_tokens": 200, "temperature": 0, "ignore_eos": True}
START_WITHIN_S = 240.0


@contextlib.contextmanager
def serving(model: Path, data_dir: Path, *, mtp: bool) -> Iterator[str]:
    """URL of a service that is ready (`mtp`: to draft, too)."""
    port = free_port()
    data_dir.mkdir()
    command = [sys.executable, "-m", "services.cli", "serve", str(model), "--port", str(port)]
    with (data_dir / "launcher.log").open("w") as log:
        launcher = subprocess.Popen(
            [*command, "--data-dir", str(data_dir), *FLAGS], stdout=log, stderr=log, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        give_up_at = time.monotonic() + START_WITHIN_S
        while not (found := probe(url)).ready or found.mtp_ready < mtp:
            assert launcher.poll() is None, (data_dir / "launcher.log").read_text()
            assert time.monotonic() < give_up_at, (data_dir / "launcher.log").read_text()
            time.sleep(0.2)
        yield url
    finally:
        launcher.send_signal(signal.SIGINT)
        launcher.wait(120)


def complete(url: str) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(REQUEST).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=240) as reply:
        answer: dict[str, Any] = json.load(reply)
    return answer


def drafted_by_module(url: str, answer: dict[str, Any]) -> int:
    """The other drafts are copies, which need no module."""
    with urllib.request.urlopen(f"{url}/v1/requests/{answer['id']}/ledger", timeout=60) as reply:
        (choice,) = json.load(reply)["choices"]
    return sum(each["drafted"] for each in choice["rounds"] if each["drafts_from"] == "mtp")


@pytest.mark.covers(62, 72, 121, 155)
def test_a_v3_folder_is_served_with_its_module_and_without_one_that_broke(tmp_path: Path) -> None:
    files = write_tiny_v3(tmp_path / "v3")
    write_mtp_manifest(files.folder, sealed(open_checkpoint(str(files.folder))))
    with serving(files.folder, tmp_path / "sound", mtp=True) as url:
        spoken = complete(url)
        assert drafted_by_module(url, spoken) > 0
    assert (
        "MiB of weights: the MTP module, embedding, final norm and head"
        in (tmp_path / "sound" / "logs" / "proposer.log").read_text()
    )
    name = LAYER + names.HNORM
    files.edit(**{name: files.tensors[name] + 0.5})  # finite, of the right shape: only the seal shows it
    with serving(files.folder, tmp_path / "broken", mtp=False) as url:
        plain = complete(url)
        assert drafted_by_module(url, plain) == 0
    assert plain["choices"][0]["text"] == spoken["choices"][0]["text"]
    log = (tmp_path / "broken" / "logs" / "proposer.log").read_text()
    assert f"{name}: holds other values than its manifest says" in log
