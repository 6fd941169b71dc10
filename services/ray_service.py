"""The whole service on a Ray of its own on this machine: loopback only, no dashboard, gone with the launcher."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from time import monotonic
from typing import Any

from seqmtp_serve.errors import NotReady
from services import banner
from services.lifeline import adopt_orphans, end_descendants
from services.processes import embedded_store, with_port
from services.settings import Settings

APP_NAME = "seqmtp"
OBJECT_STORE_BYTES = 100 * 2**20  # no token passes through it


def serve_on_ray(settings: Settings, package: str = "services") -> int:
    """Serve until SIGINT or SIGTERM; exit code 0. Raises NotReady if the port is taken, StoreError for the store.

    Whatever the reason, on return the Ray it started and the embedded store are gone; another Ray on this machine is
    neither used nor touched.
    """
    adopt_orphans()
    try:
        with contextlib.suppress(KeyboardInterrupt), _interruptible():
            settings = with_port(settings)
            with embedded_store(settings) as settings:
                _serve(settings, package)
    finally:
        end_descendants()  # what an interrupted start left
    return 0


def _serve(settings: Settings, package: str) -> None:
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
        with _interruptible():  # Ray put a handler of its own in place
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


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, in whatever call it is."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
