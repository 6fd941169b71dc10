"""From the results of a step to the rows to commit: each through its own sequence, no one paying for another."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

from seqmtp_serve.endings import Endings
from seqmtp_serve.errors import AncestryMismatch, Fenced, InternalError, ProtocolError, StaleVersion
from seqmtp_serve.frontier.ledger import Ledger
from seqmtp_serve.frontier.refusal import Remedy, remedy
from seqmtp_serve.frontier.scheduler import BatchScheduler
from seqmtp_serve.frontier.sequence import Sequence
from seqmtp_serve.live_requests import LiveRequests
from seqmtp_serve.ports import RowResult, StepPlan, StepReport
from seqmtp_serve.request import CommittedRow

_log = logging.getLogger(__name__)


class Chosen(NamedTuple):
    """A row that was chosen and is not yet committed: nobody may see it."""

    sequence: Sequence
    row: CommittedRow
    result: RowResult


class Settling:
    """Applies the results of one step; what is refused, late or unusable is dealt with here, one sequence at a time."""

    def __init__(self, scheduler: BatchScheduler, requests: LiveRequests, endings: Endings, ledger: Ledger) -> None:
        self._scheduler, self._requests, self._endings, self._ledger = scheduler, requests, endings, ledger

    def settle(self, plan: StepPlan, report: StepReport, step_ms: float) -> list[Chosen]:
        """Pass each result through its sequence and its finish checker: the rows to commit."""
        chosen = [self._settle_one(plan.step_id, result) for result in report.rows]
        for sequence in self._scheduler.in_step(plan.step_id):  # the target said nothing fitting about these
            silence = RowResult(ref=sequence.frontier.ref, error=StaleVersion.code, message="no answer")
            chosen.append(self._settle_one(plan.step_id, silence))
        timings = {"step": step_ms, "forward": report.costs.forward, "draft_wait": report.costs.draft_wait}
        timings |= {"select": report.costs.select, "pack": report.costs.pack, "mtp": report.costs.mtp}
        settled = [one for one in chosen if one is not None]
        for one in settled:
            one.row.timings_ms.update(timings)
        return settled

    def _settle_one(self, step_id: int, result: RowResult) -> Chosen | None:
        sequence = self._requests.get(result.ref.request_id)
        if sequence is None:
            self._ledger.count("late_results")
            return None
        try:
            row = self._row(sequence, step_id, result)
        except (StaleVersion, AncestryMismatch):
            self._ledger.count("late_results")
            return None
        except Exception:  # the target's or the decoder's; no other request pays for it
            _log.exception("%s: its result cannot be used", result.ref.request_id)
            row = sequence.fail(InternalError.code)
        return None if row is None else Chosen(sequence, row, result)

    def _row(self, sequence: Sequence, step_id: int, result: RowResult) -> CommittedRow | None:
        """What the result gives. One that no step can have changed nothing: it is taken for a refusal."""
        if result.error is None:
            try:
                return sequence.settle(step_id, result)
            except (StaleVersion, AncestryMismatch):
                raise
            except ProtocolError as error:
                result = replace(result, error=ProtocolError.code, message=str(error))
        return self._refused(sequence, step_id, result)

    def _refused(self, sequence: Sequence, step_id: int, result: RowResult) -> CommittedRow | None:
        """What the target would not do: replay it, wait, let go, or end it in the record."""
        sequence.check_refusal(step_id, result)
        code = result.error or ""
        _log.info("%s refused at version %d: %s", result.ref.request_id, result.ref.version, result)
        self._ledger.count(f"refused.{code}")
        match remedy(code, sequence.refusals):
            case Remedy.REPLAY:
                self._ledger.count("replays")
                sequence.refusals += 1
                self._scheduler.replay(sequence)
            case Remedy.WAIT:
                self._scheduler.replay(sequence)
            case Remedy.LET_GO:
                self._endings.with_error(sequence, Fenced(result.message or "a newer epoch owns the request"))
            case Remedy.FAIL:
                return sequence.fail(code)
        return None
