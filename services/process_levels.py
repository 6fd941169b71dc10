"""What a process holds of its system, whatever its role: with nothing to do it goes back to what it was."""

from __future__ import annotations

import asyncio
import os

OPEN_FILES = "/dev/fd"  # of the process that looks: Linux and macOS


def num_tasks() -> int:
    """asyncio tasks of the running loop; 0 where none runs."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0


def num_open_files() -> int:
    """File descriptors, sockets among them; not the one it takes to look."""
    return len(os.listdir(OPEN_FILES)) - 1


def process_levels() -> dict[str, float]:
    """Both, as gauges. To be asked on the event loop, about once a second: it costs a look at each."""
    return {"tasks": float(num_tasks()), "open_files": float(num_open_files())}
