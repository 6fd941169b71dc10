"""`seqmtp serve` as a person starts it, in a process of its own, and completions asked of it over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from services.banner import probe
from services.free_port import free_port

START_WITHIN_S = 240.0
ANSWER_WITHIN_S = 120.0


def launch_with_fakes(
    code: str, data_dir: Path, port: int, output: Path | int, fakes: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """`code`, given the folder and the port, in a session of its own; `fakes` tells pretended workers how to behave.

    What it prints goes to `output`, a file or an open file descriptor.
    """
    with open(output, "w", closefd=not isinstance(output, int)) as out:
        return subprocess.Popen(
            [sys.executable, "-c", code, str(data_dir), str(port)],
            stdout=out,
            stderr=out,
            env={**os.environ, **{f"SEQMTP_FAKE_{role.upper()}": value for role, value in fakes.items()}},
            start_new_session=True,
        )


@contextlib.contextmanager
def serving(model: str | Path, data_dir: Path, *flags: str) -> Iterator[tuple[str, psutil.Process]]:
    """URL and launcher of a service that is ready; on leaving, Ctrl-C must end all of it."""
    port = free_port()
    data_dir.mkdir()
    own = ["--port", str(port), "--data-dir", str(data_dir), "--served-model-name", "tiny"]
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
        assert [one for one in family if _is_alive(one)] == []
    finally:
        if launcher.poll() is None:
            launcher.kill()
            launcher.wait()


def complete(url: str, body: Mapping[str, Any], route: str = "/v1/completions") -> dict[str, Any]:
    """The whole answer to a completion request, or to that of another `route`."""
    with _post(url, body, route) as reply:
        answer: dict[str, Any] = json.load(reply)
    return answer


def fetch(url: str, route: str) -> dict[str, Any]:
    """What GET says, as JSON."""
    with urllib.request.urlopen(f"{url}{route}", timeout=ANSWER_WITHIN_S) as reply:
        answer: dict[str, Any] = json.load(reply)
    return answer


def stream(url: str, body: Mapping[str, Any], meanwhile: Callable[[], None] = lambda: None) -> str:
    """The streamed text; `meanwhile` is called once, after the first piece."""
    pieces: list[str] = []
    with _post(url, {**body, "stream": True}) as reply:
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            pieces += [choice["text"] for choice in json.loads(line[6:])["choices"]]
            if len(pieces) == 1:
                meanwhile()
    return "".join(pieces)


def workers(launcher: psutil.Process, word: str) -> list[int]:
    """Process ids of the workers whose command line holds `word`."""
    found = []
    for one in launcher.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if word in " ".join(one.cmdline()):
                found.append(one.pid)
    return found


def _is_alive(one: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(one.is_running() and one.status() != psutil.STATUS_ZOMBIE)
    return False


def _post(url: str, body: Mapping[str, Any], route: str = "/v1/completions") -> Any:
    request = urllib.request.Request(f"{url}{route}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=ANSWER_WITHIN_S)
