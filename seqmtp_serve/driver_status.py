"""What a coordinator can say about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from seqmtp_serve.ports import TargetInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverStatus:
    """Readiness of target, proposer and store apart, each with a sentence when it is missing.

    `counters` only rise (names: `frontier/ledger.py`); `info` is None before the first target group.
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
    draining: bool = False  # it takes nothing new
