"""A process and everything it started: who they are, what they cost in memory, and whether they are gone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil


def family(root: psutil.Process) -> list[psutil.Process]:
    """`root` and its descendants that are alive. A psutil.Process knows its start time: a reused pid is another."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [root, *root.children(recursive=True)]
    return []


def pss_mib(process: psutil.Process, proc: Path = Path("/proc")) -> float:
    """Proportional set size, MiB: shared pages are divided among those that share them, so a sum counts them once.

    0 for a process that has gone. Raises PermissionError for another user's process.
    """
    try:
        for line in (proc / str(process.pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0.0


def memory_of(processes: Iterable[psutil.Process]) -> list[dict[str, Any]]:
    """Name and PSS of each, largest first."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            found.append({"name": _label(process), "pss_mib": round(pss_mib(process), 1)})
    return sorted(found, key=lambda one: -one["pss_mib"])


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those still running (a zombie is not)."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def role_of(process: psutil.Process) -> str:
    """Which service a process is: its module's last name, or `store`."""
    try:
        label = _label(process)
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""
    return "store" if "valkey" in label or "redis" in label else label.removeprefix("services.")


def _label(process: psutil.Process) -> str:
    """`python -m services.target` by its module, a Ray worker by its title, the rest by their name."""
    command = process.cmdline()
    if "-m" in command[:-1]:
        return command[command.index("-m") + 1]
    if command and command[0].startswith("ray::"):
        return command[0].split()[0]
    return process.name()
