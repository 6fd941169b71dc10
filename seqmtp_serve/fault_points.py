"""The places in a round where a test may let the world fail. In the product nothing happens there.

    plan ─BEFORE_PREPARE▶ step ─AFTER_VERIFY▶ finish check ─BEFORE_COMMIT▶ commit ─AFTER_COMMIT▶
    publish ─AFTER_PUBLISH▶ emit

A driver calls `reached(point)` at each, synchronously: whoever it was given may kill this process there, stop it, or
raise. Between two points nothing else of the same driver runs that could tell the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class FaultPoint(StrEnum):
    """Named after what has just happened, or is about to."""

    BEFORE_PREPARE = "before_prepare"  # a plan is made; the target does not have it yet
    AFTER_VERIFY = "after_verify"  # the target's report is here, and not looked at
    BEFORE_COMMIT = "before_commit"  # rows are chosen; the store does not have them yet
    AFTER_COMMIT = "after_commit"  # the store answered; no frontier here has moved
    AFTER_PUBLISH = "after_publish"  # the frontier of one row has moved; no reader has the row yet


Reached = Callable[[FaultPoint], None]


def unharmed(point: FaultPoint) -> None:
    """What the product does at each point: nothing."""
