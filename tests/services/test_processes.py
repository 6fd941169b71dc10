"""The launcher, as a person uses it: one banner, one Ctrl-C, nothing left behind, in any phase and for any fault."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services import banner
from services.free_port import free_port
from tests.services.launched import launch_with_fakes

PACKAGE = "tests.services.fake_roles"
LAUNCH = f"""
import asyncio, sys
from pathlib import Path
from seqmtp_serve.errors import SeqMTPError
from services.processes import serve_processes
from services.settings import GatewaySettings, Settings
settings = Settings(data_dir=Path(sys.argv[1]), gateway=GatewaySettings(port=int(sys.argv[2])))
try:
    sys.exit(asyncio.run(serve_processes(settings, {PACKAGE!r})))
except SeqMTPError as error:
    sys.exit(f"seqmtp: {{error}}")
"""


class Launcher:
    """`serve_processes` in a process of its own, with workers that do nothing."""

    def __init__(self, data_dir: Path, output: int | None = None, **fakes: str) -> None:
        """What it prints goes to the file descriptor `output`, or to its log."""
        self.data_dir, self.port = data_dir, free_port()
        self.log = data_dir.with_name(f"{data_dir.name}.log")
        self.process = launch_with_fakes(LAUNCH, data_dir, self.port, output or self.log, fakes)
        self.family: list[psutil.Process] = []

    def until_ready(self) -> None:
        """It has said so, and every worker runs."""
        wait_for(lambda: "curl" in self.log.read_text())
        wait_for(lambda: len(self.children()) == 5)

    def children(self) -> list[psutil.Process]:
        found = psutil.Process(self.process.pid).children(recursive=True)
        self.family = list({*self.family, *found})
        return found

    def child(self, word: str) -> psutil.Process:
        (found,) = [one for one in self.children() if any(word in part for part in one.cmdline())]
        return found

    def end(self, timeout_s: float = 60.0) -> str:
        """What it printed, once it ended."""
        self.process.wait(timeout_s)
        return self.log.read_text()

    def nothing_left(self) -> bool:
        return not any(self._alive(one) for one in self.family) and not list(self.data_dir.glob("settings-*"))

    @staticmethod
    def _alive(one: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return one.is_running() and one.status() != psutil.STATUS_ZOMBIE
        return False


@pytest.fixture
def launchers() -> Iterator[list[Launcher]]:
    """Those a test started; whatever a failed test left is killed."""
    started: list[Launcher] = []
    yield started
    for launcher in started:
        if launcher.process.poll() is None:
            os.killpg(launcher.process.pid, signal.SIGKILL)
        launcher.process.wait()


def wait_for(condition: object, timeout_s: float = 90.0) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < give_up_at, "it did not happen in time"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_its_group_stops_everything(
    tmp_path: Path, launchers: list[Launcher], number: signal.Signals
) -> None:
    launcher = Launcher(tmp_path)
    launchers.append(launcher)
    launcher.until_ready()
    assert "valkey.sock" in (tmp_path / "logs" / "gateway.log").read_text()
    os.killpg(launcher.process.pid, number)  # as a terminal does
    printed = launcher.end()
    assert launcher.process.returncode == 0
    assert printed.partition("stopping")[2].strip() == ""
    assert f"http://127.0.0.1:{launcher.port}/v1" in printed
    assert "curl" in printed
    assert launcher.nothing_left()


def test_a_terminal_that_hangs_up_ends_it_in_order(tmp_path: Path, launchers: list[Launcher]) -> None:
    """Whatever it would print then fails."""
    terminal, its_end = pty.openpty()
    launcher = Launcher(tmp_path, output=its_end)
    launchers.append(launcher)
    os.close(its_end)
    wait_for(lambda: banner.probe(f"http://127.0.0.1:{launcher.port}").ready)
    launcher.children()
    os.close(terminal)
    os.killpg(launcher.process.pid, signal.SIGHUP)
    assert launcher.process.wait(60) == 0
    assert launcher.nothing_left()


@pytest.mark.parametrize("after_s", [0.3, 0.6, 0.9, 1.3])
def test_a_signal_during_start_up_leaves_nothing(tmp_path: Path, launchers: list[Launcher], after_s: float) -> None:
    launcher = Launcher(tmp_path)
    launchers.append(launcher)
    give_up_at = time.monotonic() + after_s
    while time.monotonic() < give_up_at:
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher.children()
        time.sleep(0.02)
    launcher.process.send_signal(signal.SIGTERM)
    launcher.end()
    assert launcher.nothing_left()


def test_a_killed_worker_comes_back_and_the_others_stay(tmp_path: Path, launchers: list[Launcher]) -> None:
    launcher = Launcher(tmp_path)
    launchers.append(launcher)
    launcher.until_ready()
    target, proposer = launcher.child("fake_roles.target"), launcher.child("fake_roles.proposer")
    proposer.kill()
    wait_for(lambda: len([one for one in launcher.children() if one.pid != proposer.pid]) == 5)
    assert launcher.child("fake_roles.target").pid == target.pid
    launcher.process.send_signal(signal.SIGTERM)
    launcher.end()
    assert launcher.nothing_left()


def test_nothing_outlives_a_killed_launcher(tmp_path: Path, launchers: list[Launcher]) -> None:
    launcher = Launcher(tmp_path)
    launchers.append(launcher)
    launcher.until_ready()
    launcher.process.kill()
    launcher.end()
    wait_for(lambda: not any(launcher._alive(one) for one in launcher.family))


def test_a_second_signal_kills_what_does_not_stop(tmp_path: Path, launchers: list[Launcher]) -> None:
    launcher = Launcher(tmp_path, coordinator="stubborn")
    launchers.append(launcher)
    launcher.until_ready()
    launcher.process.send_signal(signal.SIGINT)
    wait_for(lambda: "stopping" in launcher.log.read_text())
    time.sleep(1.0)
    assert launcher.process.poll() is None
    launcher.process.send_signal(signal.SIGINT)
    launcher.end(15.0)  # it would have been waited for longer
    assert launcher.nothing_left()


def test_without_an_mtp_module_it_serves(tmp_path: Path, launchers: list[Launcher]) -> None:
    launcher = Launcher(tmp_path, proposer="3")
    launchers.append(launcher)
    wait_for(lambda: banner.probe(f"http://127.0.0.1:{launcher.port}").ready)
    wait_for(lambda: "proposer stays down" in launcher.log.read_text())
    launcher.process.send_signal(signal.SIGTERM)
    printed = launcher.end()
    assert launcher.process.returncode == 0
    assert "proposer says why it cannot run" in printed


def test_a_model_that_cannot_be_served_ends_it_with_the_reason(tmp_path: Path, launchers: list[Launcher]) -> None:
    launcher = Launcher(tmp_path, target="3")
    launchers.append(launcher)
    printed = launcher.end()
    assert launcher.process.returncode == 1
    assert "target says why it cannot run" in printed
    launcher.data_dir = tmp_path
    assert launcher.nothing_left()


def test_a_taken_port_is_said_before_anything_starts(tmp_path: Path, launchers: list[Launcher]) -> None:
    first = Launcher(tmp_path / "first")
    launchers.append(first)
    first.until_ready()
    answer = subprocess.run(
        [sys.executable, "-c", LAUNCH, str(tmp_path / "second"), str(first.port)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert answer.returncode == 1
    assert f"cannot listen on 127.0.0.1:{first.port}" in answer.stderr
    assert not (tmp_path / "second" / "logs").exists()
