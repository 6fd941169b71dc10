"""A loopback port for a server that is started later, in another process.

A port the system gives for "any" may be given again before that server binds it: to a connection, or to another server
that asks for any. These lie below those, and two processes that ask at the same time are told different ones.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from pathlib import Path

LOWEST = 20_000  # above those that Ray's workers take
APART = 61  # ports between those of one process and of the next
_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")  # those that the system gives
_turns = itertools.count()


def free_port() -> int:
    """Another one each time; nobody listens on it now. Raises OSError when there is none."""
    span = _first_given() - LOWEST
    for turn in itertools.islice(_turns, span):
        port = LOWEST + (APART * os.getpid() + turn) % span
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free port from {LOWEST} to {LOWEST + span - 1}")


def _first_given() -> int:
    with contextlib.suppress(OSError, ValueError):
        if (first := int(_GIVEN.read_text().split()[0])) > LOWEST:
            return first
    return 1 << 15  # Linux' own; where more is given, any port can be
