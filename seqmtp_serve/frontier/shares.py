"""Which rank of a target group runs which part of a step, and the group's one answer from the ranks' reports.

Pure: it decides and remembers who holds which request; sending is the business of whoever asks. A sequence lives with
one rank from its admission to its end, because that rank holds its pages. Every rank gets a share of every step, an
empty one too: its experts may be wanted. A plan has one depth for all its rounds, so all shares have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from seqmtp_serve.errors import InternalError, RequestNotFound
from seqmtp_serve.ports import Admit, Prefill, Publish, StepCosts, StepPlan, StepReport, TargetInfo, Verify

_GONE = frozenset({InternalError.code, RequestNotFound.code})  # refusals after which the rank holds nothing

D = TypeVar("D", Admit, Prefill, Publish, Verify)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holder:
    rank: int
    epoch: int


class Roster:
    """Who holds what. `split` a plan, run the shares, `merge` their reports; then the next plan."""

    def __init__(self, free_pages: Sequence[int]) -> None:
        """`free_pages` of each rank, while nothing is admitted."""
        self._free_pages = list(free_pages)
        self._holders: dict[str, _Holder] = {}
        self._placed: set[str] = set()  # by the last plan

    def split(self, plan: StepPlan) -> list[StepPlan]:
        """One share for each rank. New requests go where the fewest are, then where the most pages are free.

        A directive about a request that nobody holds goes to rank 0, which refuses it in its own row; the release of
        one goes to all.
        """
        before = dict(self._holders)  # who holds a request when its release arrives
        self._placed.clear()
        for release in plan.release:
            holder = self._holders.get(release.request_id)
            if holder is not None and holder.epoch <= release.epoch:
                del self._holders[release.request_id]
        for admit in plan.admit:
            self._place(admit)
        return [
            replace(
                plan,
                release=tuple(each for each in plan.release if _rank(before, each.request_id, rank) == rank),
                publish=self._of(rank, plan.publish),
                admit=self._of(rank, plan.admit),
                prefill=self._of(rank, plan.prefill),
                verify=self._of(rank, plan.verify),
            )
            for rank in range(len(self._free_pages))
        ]

    def merge(self, plan: StepPlan, reports: Sequence[StepReport]) -> StepReport:
        """The report of the group. Its costs are those of the rank that took longest, so they stay disjoint."""
        self._free_pages = [report.free_pages for report in reports]
        rows = tuple(row for report in reports for row in report.rows)
        for row in rows:
            if row.error in _GONE or (row.error is not None and row.ref.request_id in self._placed):
                self._holders.pop(row.ref.request_id, None)
        slowest = max((report.costs for report in reports), key=_total_ms)
        return StepReport(
            step_id=plan.step_id,
            rows=rows,
            costs=replace(
                slowest,
                mtp=sum(report.costs.mtp for report in reports),
                num_rows=sum(report.costs.num_rows for report in reports),
                mtp_touched=sum(report.costs.mtp_touched for report in reports),
                fed_rows=sum(report.costs.fed_rows for report in reports),
                fed_bytes=sum(report.costs.fed_bytes for report in reports),
                draft_prob=sum(report.costs.draft_prob for report in reports),
                num_draft_probs=sum(report.costs.num_draft_probs for report in reports),
            ),
            free_pages=sum(self._free_pages),
            proposer_ready=all(report.proposer_ready for report in reports),
            refused_drafts=sum(report.refused_drafts for report in reports),
            experts=tuple(replace(work, rank=rank) for rank, report in enumerate(reports) for work in report.experts),
        )

    def _place(self, admit: Admit) -> None:
        request_id, known = admit.ref.request_id, self._holders.get(admit.ref.request_id)
        if known is None:
            counts = [0] * len(self._free_pages)
            for holder in self._holders.values():
                counts[holder.rank] += 1
            rank = min(range(len(counts)), key=lambda rank: (counts[rank], -self._free_pages[rank], rank))
            self._holders[request_id] = _Holder(rank=rank, epoch=admit.ref.epoch)
            self._placed.add(request_id)
        elif known.epoch < admit.ref.epoch:
            self._holders[request_id] = replace(known, epoch=admit.ref.epoch)

    def _of(self, rank: int, directives: tuple[D, ...]) -> tuple[D, ...]:
        return tuple(each for each in directives if _rank(self._holders, each.ref.request_id, 0) == rank)


def _rank(holders: dict[str, _Holder], request_id: str, otherwise: int) -> int:
    holder = holders.get(request_id)
    return otherwise if holder is None else holder.rank


def _total_ms(costs: StepCosts) -> float:
    return costs.forward + costs.draft_wait + costs.select + costs.pack


def group_info(ranks: Sequence[TargetInfo]) -> TargetInfo:
    """What the group can do: pages and sequences add up, but one sequence has the pages of one rank only."""
    first = ranks[0]
    return replace(
        first,
        num_pages=sum(rank.num_pages for rank in ranks),
        max_batch=sum(rank.max_batch for rank in ranks),
        max_model_len=min(min(rank.max_model_len, rank.num_pages * rank.page_size) for rank in ranks),
    )
