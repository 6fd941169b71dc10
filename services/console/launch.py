"""A service for as long as a command needs one: the one that runs, or one started for it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from seqmtp_serve.errors import NotReady
from services.banner import probe, say
from services.lifeline import die_with_parent

START_S = 300.0
STOP_S = 30.0
POLL_S = 0.2


@contextlib.contextmanager
def running_service(model: str | None, url: str) -> Iterator[str]:
    """The URL to use while the block runs. With a model, a service is started on a free port and stopped at the end.

    Raises NotReady, with the end of its log, if it does not come up.
    """
    if model is None:
        yield url
        return
    with socket.socket() as probed:
        probed.bind(("127.0.0.1", 0))
        port = int(probed.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="seqmtp-chat-") as folder:
        log = Path(folder) / "service.log"
        command = [sys.executable, "-m", "services.cli", "serve", model, "--no-ray", "--port", str(port)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--data-dir", folder],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C stops an answer, not the service
                preexec_fn=die_with_parent,
            )
        try:
            _until_ready(process, f"http://127.0.0.1:{port}", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            process.kill()
            process.wait()


def _until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    give_up, said = time.monotonic() + START_S, ""
    while time.monotonic() < give_up and process.poll() is None:
        answer = probe(url)
        if answer.ready and (answer.mtp_ready or "proposer" not in answer.waiting_for):
            return
        if answer.body and answer.waiting_for != said:
            said = answer.waiting_for
            say(f"waiting for {said}")
        time.sleep(POLL_S)
    raise NotReady(f"The service did not start:\n{log.read_text(errors='replace')[-2000:]}")
