"""Child processes do not outlive their parent, however it dies, nor do their own children outlive its goodbye."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys

import psutil

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """For `subprocess.Popen(preexec_fn=...)`: the kernel sends `number` when the thread that forked is gone.

    Fork from a thread that lives as long as the child should (the main thread). No effect outside Linux, where a
    launcher's own clean-up is all there is.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def adopt_orphans() -> None:
    """From now on a descendant whose parent ends becomes this process's own child. No effect outside Linux."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(patience_s: float = 3.0) -> None:
    """End whatever this process started and is still there, its children's children too: ask, wait, then kill.

    Complete only after `adopt_orphans`; without it, a process whose parent is gone is not seen.
    """
    left = psutil.Process().children(recursive=True)
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                end(process)
        _, left = psutil.wait_procs(left, timeout=patience_s)
