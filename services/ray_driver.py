"""The process that starts Ray and the application on it. The launcher runs it in a session of its own: Ray's processes
join the group of whoever starts them, and what a terminal or a supervisor sends the launcher's group is not for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from time import monotonic
from typing import Any

from seqmtp_serve.errors import NotReady, SeqMTPError
from services import banner
from services.interruptible import Interruptible
from services.lifeline import adopt_orphans, end_descendants
from services.settings import Settings, from_json

APP_NAME = "seqmtp"
OBJECT_STORE_BYTES = 100 * 2**20  # no token passes through it


def main() -> int:
    """Serve the settings on stdin until a signal asks for an end: 0. A failure is one line on stderr, and 1.

    The only argument is the package: role r runs `{package}.r.main`. On return the Ray it started is gone.
    """
    settings, (package,) = from_json(sys.stdin.read()), sys.argv[1:]
    adopt_orphans()
    try:
        with contextlib.suppress(KeyboardInterrupt), Interruptible() as interruptible:
            _serve(settings, package, interruptible)
    except SeqMTPError as error:
        print(f"seqmtp: {error}", file=sys.stderr)
        return 1
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


if __name__ == "__main__":
    sys.exit(main())
