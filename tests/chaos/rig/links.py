"""Whom a process is connected to, by the kernel's own tables: also for one in another network namespace."""

from __future__ import annotations

import contextlib
import os
from ipaddress import IPv4Address
from pathlib import Path

ESTABLISHED, TABLES = "01", ("tcp", "tcp6")


def peers_of(pid: int) -> set[tuple[str, int]]:
    """Host and port at the other end of each TCP connection of a process. None for one that is no more."""
    sockets: set[str] = set()
    try:
        tables = [Path(f"/proc/{pid}/net/{table}").read_text() for table in TABLES]
        for file in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                sockets.add(os.readlink(f"/proc/{pid}/fd/{file}"))
    except (FileNotFoundError, ProcessLookupError):
        return set()
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return {_end(row[2]) for row in rows if row[3] == ESTABLISHED and f"socket:[{row[9]}]" in sockets}


def _end(written: str) -> tuple[str, int]:
    """`0200007F:1F90`, a number in this machine's byte order; of IPv6 the mapped part of ::ffff:127.0.0.2."""
    host, port = written.split(":")
    return str(IPv4Address(int.from_bytes(bytes.fromhex(host[-8:]), "little"))), int(port, 16)
