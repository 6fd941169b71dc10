"""A child process does not outlive its parent, however the parent dies."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """For `subprocess.Popen(preexec_fn=...)`: the kernel sends SIGTERM when the thread that forked is gone.

    Fork from a thread that lives as long as the child should (the main thread). No effect outside Linux, where a
    launcher's own clean-up is all there is.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
