"""Parts of the rig without a process: who is connected to whom, what is nobody's loss, why there is no wire."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from tests.chaos.history import FellBack
from tests.chaos.rig.links import peers_of
from tests.chaos.rig.namespaces import why_not
from tests.chaos.rig.store_log import StoreLog


def command(*words: str) -> bytes:
    """As the append-only file has it."""
    return b"".join([b"*%d\r\n" % len(words), *(b"$%d\r\n%s\r\n" % (len(word), word.encode()) for word in words)])


def test_a_record_whose_window_is_over_is_nobodys_loss(tmp_path: Path) -> None:
    folder = tmp_path / "appendonlydir"
    folder.mkdir()
    now_ms = round(1e3 * time.time())
    written = [("old", now_ms - 1), ("live", now_ms + 60_000)]
    text = b"".join(
        command("HINCRBY", f"seqmtp:{{{name}}}:state", "epoch", "1")
        + command("PEXPIREAT", f"seqmtp:{{{name}}}:state", str(at_ms))
        for name, at_ms in written
    )
    (folder / "appendonly.aof.1.incr.aof").write_bytes(text)
    log = StoreLog(tmp_path)
    assert log.read() == 2
    log.go_on_with(tmp_path / "promoted", {}, promised=True)
    assert log.events[2:] == [FellBack(request_id="live", epoch=0, version=0, promised=True)]


@pytest.mark.parametrize(
    ("family", "host", "to"), [(socket.AF_INET, "127.0.0.2", "127.0.0.2"), (socket.AF_INET6, "::", "::ffff:127.0.0.2")]
)
def test_whom_a_process_is_connected_to(family: socket.AddressFamily, host: str, to: str) -> None:
    with socket.socket(family) as listener, socket.socket(family) as client:
        listener.bind((host, 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert ("127.0.0.2", port) not in peers_of(os.getpid())
        client.connect((to, port))
        assert ("127.0.0.2", port) in peers_of(os.getpid())
    assert peers_of(2**30) == set()


def test_why_there_are_no_namespaces_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "iproute2" in why_not()
    refusing = tmp_path / "ip"
    refusing.write_text("#!/bin/sh\necho 'RTNETLINK answers: Operation not permitted' >&2\nexit 2\n")
    refusing.chmod(0o755)
    assert why_not().endswith("says: RTNETLINK answers: Operation not permitted")
