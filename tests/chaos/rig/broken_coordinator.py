"""A coordinator that is wrong on purpose, as a real process: `CHAOS_CONTROL` names how. The rig starts it, nobody else.

It lives with the tests and patches its own process; nothing in the product can be told to do this.
"""

from __future__ import annotations

import os

from services.coordinator import main as coordinator
from services.entry import main
from services.store import client, connection
from services.store.scripts import COMMIT, Script
from tests.chaos.simulation.controls import EagerDriver

_CHECKS = (
    "if tonumber(now[2]) == version and now[3] == digest and now[4] == epoch then return 'DUP' end",
    "if tonumber(now[2]) + 1 ~= version then return 'CONFLICT' end",
)


def forgetful_commit() -> Script:
    """The commit script without its memory: a row that is sent again is another row."""
    text = COMMIT.text
    for check in _CHECKS:
        assert check in text, "the commit script has changed: so must its control"
        text = text.replace(check, "version = tonumber(now[2]) + 1" if "CONFLICT" in check else "")
    return Script(name="commit", text=text)


def break_it(control: str) -> None:
    """Put the broken part in."""
    if control == "emit before commit":
        coordinator.RoundDriver = EagerDriver
    elif control == "commit not idempotent":
        broken = forgetful_commit()
        client.scripts.COMMIT = broken
        connection.ALL = tuple(broken if script is COMMIT else script for script in connection.ALL)
    else:
        raise SystemExit(f"no such control: {control}")


if __name__ == "__main__":
    break_it(os.environ["CHAOS_CONTROL"])
    main("coordinator", coordinator.run)
