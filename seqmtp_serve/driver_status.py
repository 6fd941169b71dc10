"""What a coordinator can say about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from seqmtp_serve.frontier.scheduler import BatchScheduler
from seqmtp_serve.ports import TargetInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverStatus:
    """Readiness of target, proposer and store apart, each with a sentence when it is missing.

    `counters` only rise (names: `frontier/ledger.py`); `info` is None before the first target group.
    `gauges` are levels as of now: pages, requests, depth.
    """

    target_ready: bool
    target_detail: str
    proposer_ready: bool
    store_ready: bool
    store_detail: str
    info: TargetInfo | None
    running: int
    waiting: int
    max_waiting: int
    depth_reason: str
    counters: Mapping[str, float]
    gauges: Mapping[str, float]
    draining: bool = False  # it takes nothing new


def levels(scheduler: BatchScheduler, free_pages: int, num_live: int) -> dict[str, float]:
    """The gauges. `free_pages` is the target's own word; `pages_held` what we believe we hold of it.

    With nobody running, free pages below `pages` are pages that were lost.
    """
    group = scheduler.info
    if group is None:
        return {"requests_live": float(num_live)}
    asked = [sequence.asked_depth for sequence in scheduler.running]
    return {
        "requests_live": float(num_live),
        "depth": sum(asked) / len(asked) if asked else 0.0,
        "pages": float(group.num_pages),
        "pages_free": float(free_pages),
        "pages_held": float(group.num_pages - scheduler.free_pages),
        "waiting_tokens": float(scheduler.waiting_tokens),
        "max_batch": float(scheduler.max_batch),
    }
