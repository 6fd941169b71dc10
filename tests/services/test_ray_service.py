"""The service on a local Ray, with workers that do nothing: it starts, heals, keeps to itself, leaves nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from ray.serve.generated.serve_pb2 import ASGIRequest
from ray.serve.generated.serve_pb2_grpc import ASGIServiceStub
from ray.serve.schema import ServeDeploySchema

from services import app as ray_app
from services.app import application, build
from services.free_port import free_port
from services.interruptible import AGAIN_S, Interruptible
from services.processes import GOODBYE_S
from services.ray_service import RAY_ENDS_S
from services.settings import Settings, SpeculationSettings
from tests.services.launched import launch_with_fakes, workers

pytestmark = pytest.mark.slow

DRAIN_S = 1.0
LAUNCH = f"""
import sys
from pathlib import Path
from services.ray_service import serve_on_ray
from services.settings import GatewaySettings, Settings
gateway = GatewaySettings(port=int(sys.argv[2]))
settings = Settings(data_dir=Path(sys.argv[1]), gateway=gateway, drain_s={DRAIN_S})
sys.exit(serve_on_ray(settings, "tests.services.ray_roles"))
"""
STOPS_WITHIN_S = DRAIN_S + GOODBYE_S + RAY_ENDS_S + 8.0  # `end_descendants` asks, waits and kills after it


class Launcher:
    """`serve_on_ray` in a process and a session of its own."""

    def __init__(self, data_dir: Path, **fakes: str) -> None:
        self.port = free_port()
        self.log = data_dir / "launcher.log"
        self.process = launch_with_fakes(LAUNCH, data_dir, self.port, self.log, fakes)

    def ready(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            answer: dict[str, Any] = json.load(urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=5))
            return answer
        return {}

    def pid(self, role: str) -> int:
        """Of the one live worker of a role; 0: none, or an old and a new one at once."""
        return int(self.ready().get(role, {}).get("detail", 0))

    def family(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def signal_group(self, number: signal.Signals, timeout_s: float = 60.0) -> int:
        """As a terminal does: every process of the group gets it."""
        os.killpg(self.process.pid, number)
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        print(self.log.read_text())  # pytest shows it beside a failure


def wait_for(condition: Any, timeout_s: float = 90.0) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, "it did not happen in time"
        time.sleep(0.1)


def open_to_the_network(family: list[psutil.Process]) -> list[tuple[str, int]]:
    """Name and port of each socket that listens beyond loopback."""
    found = []
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):  # Ray ends workers that it has no use for
            found += [
                (" ".join(process.cmdline()), one.laddr.port)
                for one in process.net_connections("tcp")
                if one.status == psutil.CONN_LISTEN and one.laddr.ip not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")
            ]
    return found


def refuses_strangers(port: int) -> bool:
    """Whether a Serve replica turns away a call without the cluster's token."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as refused:
        ASGIServiceStub(channel).HandleRequest(ASGIRequest(), timeout=10)
    return bool(refused.value.code() == grpc.StatusCode.UNAUTHENTICATED)


def group_of(one: psutil.Process) -> int:
    """Its process group; 0: it is gone."""
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(one.pid)
    return 0


def alive(one: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(one.is_running() and one.status() != psutil.STATUS_ZOMBIE)
    return False


def test_a_life_on_ray(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, proposer="incomplete")
    try:
        wait_for(lambda: "curl" in launcher.log.read_text() or launcher.process.poll() is not None)
        wait_for(lambda: launcher.pid("coordinator") and launcher.pid("target"))
        first = launcher.pid("target")
        assert first > 0
        assert launcher.pid("proposer") == 0  # no MTP module: its replica idles and is not replaced over and over

        os.kill(first, signal.SIGKILL)
        wait_for(lambda: launcher.pid("target") not in (0, first))

        family = launcher.family()
        for process, port in open_to_the_network(family):
            assert process.startswith("ray::ServeReplica"), process
            assert refuses_strangers(port)

        assert [one.pid for one in family if group_of(one) == launcher.process.pid] == [launcher.process.pid]
        assert launcher.signal_group(signal.SIGTERM, STOPS_WITHIN_S) == 0
        wait_for(lambda: not any(map(alive, family)))
        assert launcher.log.read_text().partition("stopping")[2].strip() == ""  # no word of Ray's about its own end
    finally:
        launcher.kill()


def test_it_ends_though_every_process_of_rays_is_ending_too(tmp_path: Path) -> None:
    """As a supervisor does that signals each process, whatever its group: nobody is left to take the replicas down."""
    launcher = Launcher(tmp_path)
    try:
        wait_for(lambda: "curl" in launcher.log.read_text())
        family = launcher.family()
        for one in family:
            one.terminate()
        assert launcher.process.wait(STOPS_WITHIN_S) == 0
        wait_for(lambda: not any(map(alive, family)))
    finally:
        launcher.kill()


def test_a_model_that_cannot_be_served_ends_it_with_the_reason(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, target="incomplete")
    try:
        wait_for(lambda: launcher.process.poll() is not None)
        assert launcher.process.returncode != 0
        assert "Target: RuntimeError: target_incomplete: target says why it cannot run" in launcher.log.read_text()
    finally:
        launcher.kill()


def test_a_killed_driver_ends_it_and_is_named(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path)
    try:
        wait_for(lambda: "starting Ray" in launcher.log.read_text())
        (driver,) = workers(psutil.Process(launcher.process.pid), "services.ray_driver")
        family = launcher.family()
        os.kill(driver, signal.SIGKILL)
        assert launcher.process.wait(STOPS_WITHIN_S) == 1
        assert "the process that runs Ray was killed by signal 9" in launcher.log.read_text()
        wait_for(lambda: not any(map(alive, family)))
    finally:
        launcher.kill()


@pytest.mark.parametrize(("number", "after_s"), [(signal.SIGTERM, 1.0), (signal.SIGHUP, 5.0)])
def test_a_signal_during_start_up_leaves_nothing(tmp_path: Path, number: signal.Signals, after_s: float) -> None:
    launcher = Launcher(tmp_path)
    seen: set[psutil.Process] = set()
    try:
        give_up_at = time.monotonic() + after_s
        while time.monotonic() < give_up_at:
            seen.update(launcher.family())
            time.sleep(0.1)
        launcher.signal_group(number)
        wait_for(lambda: not any(map(alive, seen)))
    finally:
        launcher.kill()


@pytest.mark.parametrize("anothers", [False, True])
def test_an_interrupt_that_python_dropped_comes_again(anothers: bool) -> None:
    """`anothers`: what dropped it was the handler that Ray's start puts in place."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), Interruptible():
        if anothers:
            signal.signal(signal.SIGTERM, lambda *_: None)
        with contextlib.suppress(KeyboardInterrupt):  # as Python does around a weak reference's callback
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
        time.sleep(20)
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_interrupt_that_was_heard_does_not_come_again() -> None:
    with Interruptible() as interruptible:
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        interruptible.was_heard()
        time.sleep(AGAIN_S + 0.5)


def test_the_application_names_every_service_and_no_proposer_at_depth_0() -> None:
    def names(settings: Settings) -> list[str]:
        found = application(settings)._bound_deployment
        return sorted([found.name, *(argument._bound_deployment.name for argument in found.init_args)])

    assert names(Settings()) == ["Coordinator", "Gateway", "Proposer", "Target"]
    assert names(Settings(speculation=SpeculationSettings(num_speculative_tokens=0))) == [
        "Coordinator",
        "Gateway",
        "Target",
    ]


def test_build_is_what_a_cluster_config_names() -> None:
    config = {"applications": [{"name": "seqmtp", "import_path": "services.app:build", "args": {"log_level": "debug"}}]}
    assert ServeDeploySchema.model_validate(config).applications[0].import_path == "services.app:build"
    assert build(config["applications"][0]["args"])._bound_deployment.name == "Gateway"  # type: ignore[arg-type]
    assert set(ray_app.CPUS) == {"target", "proposer", "coordinator", "gateway"}
