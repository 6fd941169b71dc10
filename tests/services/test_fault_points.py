"""The switch for fault points: off by itself, on only with a rig behind it, refused in any other case."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from seqmtp_serve.errors import InvalidField
from seqmtp_serve.fault_points import FaultPoint, unharmed
from services.fault_points import SOCKET, fault_points
from services.settings import RpcSettings, Settings
from services.settings_sources import FAULT_POINTS


@pytest.fixture
def listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tmp_path.chmod(0o700)
    monkeypatch.setenv(FAULT_POINTS, str(tmp_path))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / SOCKET))
        listening.listen()
        yield listening


def test_without_the_variable_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FAULT_POINTS, raising=False)
    assert fault_points("coordinator", Settings()) is unharmed


def test_a_forgotten_variable_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv(FAULT_POINTS, str(tmp_path))
    with pytest.raises(InvalidField, match="unset it"):
        fault_points("coordinator", Settings())


def test_a_folder_open_to_others_is_refused(listener: socket.socket, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(InvalidField, match="private"):
        fault_points("coordinator", Settings())


def test_a_service_open_to_others_is_refused(listener: socket.socket) -> None:
    with pytest.raises(InvalidField, match="beyond loopback"):
        fault_points("target", Settings(rpc=RpcSettings(host="0.0.0.0")))


def test_an_armed_point_waits_for_the_rig_once(
    listener: socket.socket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reached = fault_points("coordinator", Settings())
    listener.accept()[0].close()  # it looked whether there is a rig
    assert "FAULT POINTS ARE ON" in caplog.text
    (tmp_path / "coordinator.before_commit").touch()
    reached(FaultPoint.AFTER_VERIFY)  # not armed: nothing
    worker = threading.Thread(target=reached, args=(FaultPoint.BEFORE_COMMIT,))
    worker.start()
    link, _ = listener.accept()
    with link:
        told = json.loads(link.makefile().readline())
        assert (told["role"], told["point"]) == ("coordinator", "before_commit")
        assert worker.is_alive()
        link.sendall(b".")
        worker.join(30)
    assert not worker.is_alive()
    reached(FaultPoint.BEFORE_COMMIT)  # taken: not again
