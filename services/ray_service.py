"""The whole service on a Ray of its own on this machine: loopback only, no dashboard, gone with the launcher."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from time import monotonic
from typing import Any

from seqmtp_serve.errors import NotReady
from services import banner
from services.lifeline import adopt_orphans, end_descendants
from services.processes import embedded_store, with_port
from services.settings import Settings

APP_NAME = "seqmtp"
OBJECT_STORE_BYTES = 100 * 2**20  # no token passes through it
_ASKING = (signal.SIGTERM, signal.SIGINT)
AGAIN_S = 2.0  # longer than what hears an interrupt needs to say so


def serve_on_ray(settings: Settings, package: str = "services") -> int:
    """Serve until SIGINT or SIGTERM; exit code 0. Raises NotReady if the port is taken, StoreError for the store.

    Whatever the reason, on return the Ray it started and the embedded store are gone; another Ray on this machine is
    neither used nor touched.
    """
    adopt_orphans()
    try:
        with contextlib.suppress(KeyboardInterrupt), Interruptible() as interruptible:
            settings = with_port(settings)
            with embedded_store(settings) as settings:
                try:
                    _serve(settings, package, interruptible)
                finally:
                    interruptible.was_heard()
    finally:
        end_descendants()  # what an interrupted start left
    return 0


def _serve(settings: Settings, package: str, interruptible: Interruptible) -> None:
    """Until interrupted."""
    started_at = monotonic()
    banner.say("starting Ray on this machine")
    set_ray_environment(settings)
    import ray
    from ray import serve

    from services.app import application

    is_deployed = False
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # the banner says what its news would
    try:
        ray.init(**ray_options())
        interruptible.install()  # Ray put a handler of its own in place
        serve.start(http_options={"host": settings.gateway.host, "port": settings.gateway.port})
        try:
            serve.run(application(settings, package), name=APP_NAME, logging_config={"enable_access_log": False})
        except RuntimeError as error:  # all that Serve says here is which deployment failed
            raise NotReady(f"{error}\n{_reasons(serve.status())}") from error
        is_deployed = True
        answer = asyncio.run(banner.until_ready(settings))
        print(banner.text(settings, answer, monotonic() - started_at), flush=True)
        signal.pause()
    finally:
        interruptible.was_heard()
        banner.say("stopping")
        # Not `serve.shutdown`: its controller ends itself before it answers, and Ray complains of that on the terminal.
        with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C skips the replicas' own goodbyes
            if is_deployed:
                serve.delete(APP_NAME)
        ray.shutdown()


def _reasons(status: Any) -> str:
    """What each deployment that failed said last: Serve's message ends with the traceback of its constructor."""
    deployments = status.applications[APP_NAME].deployments.items()
    said = {name: [line for line in one.message.splitlines() if line.strip()] for name, one in deployments}
    return "\n".join(f"{name}: {lines[-1].strip()}" for name, lines in said.items() if lines)


def ray_options() -> dict[str, Any]:
    """For `ray.init`: a new local Ray, never one that is already there."""
    return {
        "address": "local",
        "num_cpus": max(2, os.cpu_count() or 2),
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        "log_to_driver": False,
        "configure_logging": False,
    }


def set_ray_environment(settings: Settings) -> None:
    """What Ray reads from the environment, for this process and those it starts; to be set before Ray is imported."""
    threads = str(settings.engine.num_threads)
    os.environ |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    # Ray replaces a loopback address by the host's own, and then its parts listen everywhere. This switch, meant for
    # laptops' firewalls, keeps the whole of it on loopback.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    # Serve's replicas listen for each other on every interface, whatever Ray is told: they hear only who has the token.
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")


class Interruptible:
    """While it is entered, SIGINT and SIGTERM raise KeyboardInterrupt in whatever call the main thread is in.

    Python drops what a handler raises while a callback of its own runs (a weak reference's, a fork's, a destructor's),
    and Ray's start puts a handler of Ray's in place. So a thread listens for signals too, whatever handler they
    have, and sends SIGINT every `AGAIN_S` seconds until `was_heard`. Main thread only.
    """

    def __init__(self) -> None:
        self._heard = threading.Event()

    def install(self) -> None:
        """Put the handlers in place, again if something else replaced them."""
        for number in _ASKING:
            signal.signal(number, _interrupt)

    def was_heard(self) -> None:
        """The block is ending: only another signal from outside interrupts it again."""
        self._heard.set()

    def __enter__(self) -> Interruptible:
        self._before = {number: signal.getsignal(number) for number in _ASKING}
        self._told, told = socket.socketpair()
        told.setblocking(False)
        self._telling, self._told_before = told, signal.set_wakeup_fd(told.fileno())
        threading.Thread(target=self._repeat, name="interrupt", daemon=True).start()
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.was_heard()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._told_before)
        self._telling.close()

    def _repeat(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        with self._told:
            while told := self._told.recv(1):  # the number of a signal
                while told[0] in _ASKING and not self._heard.wait(AGAIN_S):
                    signal.pthread_kill(main, signal.SIGINT)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
