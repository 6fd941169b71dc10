"""`python -m tests [pytest's arguments]`: every test; those of one process side by side, then the slow ones in turn.

Tests marked `slow` start real processes and judge how soon something happens, so nothing runs beside them.
"""

from __future__ import annotations

import os
import subprocess
import sys

NOTHING_RAN = 5  # pytest's exit code when no test was selected
MOST = 4  # a container's share may be less than the cores it sees
WORKERS = str(min(MOST, len(os.sched_getaffinity(0))))
# In the order of their names: files with few tests, the dearest among them, would come last otherwise, and alone.
SIDE_BY_SIDE = ("-n", WORKERS, "--dist", "loadfile", "--no-loadscope-reorder")
TURNS = (
    ("in one process, side by side", [*SIDE_BY_SIDE, "-m", "not slow"], {"OMP_NUM_THREADS": "1"}),
    ("with real processes, in turn", ["-m", "slow"], {}),
)


def run(arguments: list[str]) -> int:
    """Both turns, whatever the first one gave; the exit code of the first that failed."""
    codes = []
    for what, options, environment in TURNS:
        print(f"--- {what}", flush=True)
        command = [sys.executable, "-m", "pytest", *options, *arguments]
        codes.append(subprocess.run(command, env=environment | os.environ, check=False).returncode)
    if set(codes) == {NOTHING_RAN}:
        return NOTHING_RAN
    return next((code for code in codes if code not in (0, NOTHING_RAN)), 0)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
