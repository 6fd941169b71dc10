"""The whole service on a Ray of its own on this machine: loopback only, no dashboard, gone with the launcher.

The launcher holds the store and hears the signals; Ray is its driver's (`ray_driver.py`), which may hang, and is killed
then.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from time import monotonic

from seqmtp_serve.errors import NotReady
from services.interruptible import Interruptible
from services.lifeline import adopt_orphans, die_with_parent, end_descendants
from services.processes import GOODBYE_S, embedded_store, with_port
from services.settings import Settings

RAY_ENDS_S = 5.0  # once the replicas have said goodbye


def serve_on_ray(settings: Settings, package: str = "services") -> int:
    """Serve until SIGINT, SIGTERM or a hang-up; exit code 0, or that of the driver, which said why it ended.

    Raises NotReady if the port is taken or the driver was killed, StoreError for the store. Whatever the reason, on
    return the Ray it started and the embedded store are gone; another Ray on this machine is neither used nor touched.
    """
    adopt_orphans()
    try:
        with contextlib.suppress(KeyboardInterrupt), Interruptible() as interruptible:
            settings = with_port(settings)
            with embedded_store(settings) as settings:
                try:
                    return _drive(settings, package, interruptible)
                finally:
                    interruptible.was_heard()
    finally:
        end_descendants()
    return 0


def _drive(settings: Settings, package: str, interruptible: Interruptible) -> int:
    """Run the driver until it ends or an interrupt does. Raises NotReady if something else killed it."""
    driver = subprocess.Popen(
        [sys.executable, "-m", "services.ray_driver", package],
        stdin=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    assert driver.stdin is not None
    try:
        with contextlib.suppress(BrokenPipeError), driver.stdin:  # broken: its exit code says more
            driver.stdin.write(settings.to_json().encode())  # secrets too: no file holds them
        code = driver.wait()
    except KeyboardInterrupt:
        interruptible.was_heard()
        _stop(driver, settings.drain_s + GOODBYE_S + RAY_ENDS_S)
        return 0
    if code < 0:
        raise NotReady(f"the process that runs Ray was killed by signal {-code}")
    return code


def _stop(driver: subprocess.Popen[bytes], within_s: float) -> None:
    """Ask it to end, again with each further interrupt: a second one skips the replicas' own goodbyes. Then kill it."""
    give_up_at = monotonic() + within_s
    while driver.poll() is None:
        try:
            driver.terminate()
            driver.wait(max(0.0, give_up_at - monotonic()))
        except KeyboardInterrupt:
            continue
        except subprocess.TimeoutExpired:
            driver.kill()
