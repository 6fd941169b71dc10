"""The engine of a whole target group, as its leader's step thread sees it: one step in, one report out.

The leader is rank 0 and runs its own share in the same thread, while the others run theirs; inside the pass the ranks
meet at each exchange of the experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from seqmtp_serve.frontier.shares import Roster, group_info
from seqmtp_serve.ports import StepPlan, StepReport, TargetInfo
from services.target.step_thread import StepEngine


class Others(Protocol):
    """Where the shares of the other ranks go (`crew.py`)."""

    def send(self, shares: Sequence[StepPlan]) -> Sequence[Future[StepReport]]: ...


class GangEngine:
    """Implements step_thread.StepEngine over rank 0's own engine and the other ranks.

    A step raises Unavailable when a rank is lost. It has no clock of its own: the watchdog of the step thread counts
    for the whole gang, and that of each rank for itself.
    """

    def __init__(self, own: StepEngine, others: Others, infos: Sequence[TargetInfo]) -> None:
        """`infos` of ranks 1, 2, …"""
        self._own, self._others = own, others
        self._info = group_info((own.info(), *infos))
        self._roster = Roster([info.num_pages for info in (own.info(), *infos)])

    def info(self) -> TargetInfo:
        """What the group can do."""
        return self._info

    def step(self, plan: StepPlan) -> StepReport:
        """Every rank's share, at the same time."""
        own_share, *shares = self._roster.split(plan)
        answers = self._others.send(shares)
        own = self._own.step(own_share)
        return self._roster.merge(plan, [own, *(answer.result() for answer in answers)])

    def levels(self) -> Mapping[str, float]:
        """Rank 0's; the others give account of themselves."""
        return self._own.levels()

    @property
    def is_idle(self) -> bool:
        """Whether rank 0 holds no request. The others look after themselves."""
        return self._own.is_idle

    def check(self) -> None:
        """Rank 0's invariants."""
        self._own.check()
