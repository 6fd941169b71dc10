"""Lets a test rig stop this process at a named point of a round. Off, and without effect, in any service.

The rig names a folder of its own in `SEQMTP_FAULT_POINTS`. To arm a point for one worker of a role it puts a file
`<role>.<point>` there; the first worker that reaches the point takes the file, says so on the rig's socket, and waits
for a byte. Meanwhile the rig does its harm: to this process, or to any other.

A process that finds the variable set without a rig behind it does not start: a service must not run with a switch
that somebody forgot.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from ipaddress import ip_address
from pathlib import Path
from stat import S_IMODE

from seqmtp_serve.errors import InvalidField
from seqmtp_serve.fault_points import FaultPoint, Reached, unharmed
from services.settings import Settings
from services.settings_sources import FAULT_POINTS, fault_rig

SOCKET = "rig.sock"

log = logging.getLogger(__name__)


def fault_points(role: str, settings: Settings) -> Reached:
    """What a worker of `role` does at each point: nothing, unless a rig started it.

    Raises InvalidField when the variable is set and no rig answers there, or this worker can be reached from outside.
    """
    folder = fault_rig()
    if folder is None:
        return unharmed
    if (reason := _not_a_rig(folder)) is not None:
        raise InvalidField(f"{FAULT_POINTS} is for the fault rig of the tests, and {folder} {reason}: unset it")
    if not all(ip_address(host).is_loopback for host in (settings.rpc.host, settings.gateway.host)):
        raise InvalidField(f"{FAULT_POINTS} is set, and this service listens beyond loopback: unset it")
    log.warning("FAULT POINTS ARE ON: the rig in %s may stop this process at any of them", folder)
    return _Armed(role, folder)


def _not_a_rig(folder: Path) -> str | None:
    """Why the folder is no rig's; None if it is. Talks to the rig once."""
    try:
        status = folder.stat()
        if status.st_uid != os.getuid() or S_IMODE(status.st_mode) != 0o700:
            return "is not a private folder of this user"
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(folder / SOCKET))
    except OSError as error:
        return f"has no rig behind it ({error.strerror})"
    return None


class _Armed:
    """Takes a point's file if there is one, tells the rig, and waits for it. A rig that is gone holds nobody up."""

    def __init__(self, role: str, folder: Path) -> None:
        self._role, self._folder = role, folder

    def __call__(self, point: FaultPoint) -> None:
        armed = self._folder / f"{self._role}.{point}"
        try:
            os.unlink(armed)  # of several workers one succeeds
        except FileNotFoundError:
            return
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(self._folder / SOCKET))
            link.sendall(json.dumps({"role": self._role, "point": point, "pid": os.getpid()}).encode() + b"\n")
            link.recv(1)
