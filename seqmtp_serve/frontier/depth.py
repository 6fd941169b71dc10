"""How deep to speculate in the next step, and why. Decided from the ledger; the text does not depend on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from seqmtp_serve.frontier.ledger import Ledger

PROBE_STEPS = 4  # steps to measure a depth that has no numbers yet
REPROBE_EVERY = 128  # steps between two looks at the alternatives


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthChoice:
    """`fallback`: the ledger said speculation loses, so this step decodes plainly."""

    depth: int
    reason: str
    fallback: bool = False


class DepthPolicy:
    """`static`: always the largest depth. `auto`: measure every depth at this batch size, then the one that pays most.

    Pure but for the count of steps it has decided, which times the measurements.
    """

    def __init__(self, policy: Literal["static", "auto"], max_depth: int) -> None:
        self._policy = policy
        self._max_depth = max_depth
        self._num_decided = 0

    def choose(self, ledger: Ledger, batch: int, limit: int, *, proposer_ready: bool) -> DepthChoice:
        """The depth for a step of `batch` rounds, none of which can use more than `limit` drafts.

        Without a proposer nothing is asked that would be waited for.
        """
        limit = min(limit, self._max_depth)
        if limit <= 0:
            return DepthChoice(depth=0, reason="speculation is off, or only one token is left")
        if not proposer_ready:
            return DepthChoice(depth=0, reason="no proposer is ready")
        if self._policy == "static":
            return DepthChoice(depth=limit, reason="static")
        self._num_decided += 1
        return self._probe(ledger, batch, limit) or self._best(ledger, batch, limit)

    def _probe(self, ledger: Ledger, batch: int, limit: int) -> DepthChoice | None:
        for depth in range(limit + 1):
            if ledger.num_steps(depth, batch) < PROBE_STEPS:
                return DepthChoice(depth=depth, reason=f"measuring depth {depth} at batch {batch}")
        turn, phase = divmod(self._num_decided, REPROBE_EVERY)
        if phase < PROBE_STEPS:
            depth = turn % (limit + 1)
            return DepthChoice(depth=depth, reason=f"measuring depth {depth} at batch {batch} again")
        return None

    def _best(self, ledger: Ledger, batch: int, limit: int) -> DepthChoice:
        gains = [(ledger.typical_speedup(depth, batch) or 0.0, depth) for depth in range(1, limit + 1)]
        gain, depth = max(gains)
        if gain <= 1.0:
            return DepthChoice(depth=0, reason=f"the ledger says lose: best S {gain:.2f}", fallback=True)
        return DepthChoice(depth=depth, reason=f"S {gain:.2f} at depth {depth}, batch {batch}")
