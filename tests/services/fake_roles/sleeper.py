"""A worker that does nothing until SIGTERM. `SEQMTP_FAKE_<ROLE>` makes it misbehave: an exit code, or "stubborn"."""

from __future__ import annotations

import os
import signal
import sys


def main(role: str) -> None:
    behaviour = os.environ.get(f"SEQMTP_FAKE_{role.upper()}", "")
    if behaviour.isdigit():
        print(f"{role} says why it cannot run", file=sys.stderr)
        sys.exit(int(behaviour))
    awaited = {signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    while True:
        signal.sigwait(awaited)
        if behaviour != "stubborn":
            return
