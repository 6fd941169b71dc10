"""Negative controls: services that are wrong in one place each. The checker must say so, or it is worth nothing.

They live here and only here: the product has no switch for any of this.
"""

from __future__ import annotations

from dataclasses import replace

from seqmtp_serve.committing import Committing
from seqmtp_serve.frontier.row_chain import RowChain
from seqmtp_serve.live_requests import LiveRequests
from seqmtp_serve.ports import Admit, Commit, CommitResult, Publish, StepPlan, StepReport
from seqmtp_serve.request import CommittedRow, Ref
from seqmtp_serve.rounds import RoundDriver
from seqmtp_serve.settling import Chosen
from tests.chaos.simulation.client import SimClient
from tests.chaos.simulation.parts import Parts
from tests.chaos.simulation.store import LoggedStore
from tests.chaos.simulation.target import SimTarget, SimTargetLink


class EpochBlindStore(LoggedStore):
    """Commits whoever asks, if only the version follows: a fenced owner goes on writing."""

    def _commit_one(self, commit: Commit) -> CommitResult:
        record = self._find(commit.row.request_id)
        return super()._commit_one(commit if record is None else replace(commit, epoch=record.epoch))


class ForgetfulStore(LoggedStore):
    """Appends every row it is sent: a commit that is repeated because its reply was lost is a second row."""

    def _commit_one(self, commit: Commit) -> CommitResult:
        record = self._find(commit.row.request_id)
        if record is None or record.finish is not None or commit.epoch != record.epoch:
            return super()._commit_one(commit)
        following = len(record.rows) + 1
        record.committed_by = 0  # nothing is remembered of the last commit
        return super()._commit_one(replace(commit, row=replace(commit.row, version=following)))


class _ShowsOnce(LiveRequests):
    """Readers are shown each version once, however often it is handed over."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self._shown: dict[str, int] = {}

    def open(self, request_id: str) -> None:
        self._shown.pop(request_id, None)
        super().open(request_id)

    def append(self, row: CommittedRow) -> None:
        if row.version > self._shown.get(row.request_id, 0):
            self._shown[row.request_id] = row.version
            super().append(row)


class _Eager:
    """Shows rows before the commit they are handed to."""

    def __init__(self, committing: Committing, requests: LiveRequests) -> None:
        self._committing, self._requests = committing, requests
        self.cancel_after = committing.cancel_after

    async def commit(self, chosen: list[Chosen]) -> float:
        for one in chosen:
            self._requests.append(one.row)
        return await self._committing.commit(chosen)


class EagerDriver(RoundDriver):
    """Shows a row first and commits it then: faster, until something dies in between."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        eager = _ShowsOnce(self._requests._decoder_factory)
        for part in (self, *vars(self).values()):
            if hasattr(part, "_requests"):
                part._requests = eager
        self._committing = _Eager(self._committing, eager)


class CredulousTarget(SimTarget):
    """Takes every message about a request for one about the state it holds, whatever epoch, version and digest say."""

    def _find(self, ref: Ref):
        held = self.held.get(ref.request_id)
        return super()._find(ref if held is None else held.ref)

    def _admit(self, item: Admit) -> None:
        if item.ref.request_id not in self.held:
            super()._admit(item)

    def _publish(self, item: Publish) -> None:
        held = self._find(item.ref)
        held.output_ids += held.selected
        held.kv_len += held.selected_keep
        held.ref, held.selected, held.num_rows = item.ref, [], held.kv_len


class CredulousLink(SimTargetLink):
    """Takes every result for one about the state the plan asked about."""

    async def step(self, plan: StepPlan) -> StepReport:
        report = await super().step(plan)
        asked = {item.ref.request_id: item.ref for item in (*plan.prefill, *plan.verify)}
        rows = [replace(row, ref=asked.get(row.ref.request_id, row.ref)) for row in report.rows]
        return replace(report, rows=tuple(rows))


class CredulousClient(SimClient):
    """Shows whatever row comes under a version that it does not have."""

    def _check(self, chain: RowChain, row: CommittedRow) -> None:
        pass


CONTROLS = {
    "epoch check off": Parts(store=EpochBlindStore),
    "commit not idempotent": Parts(store=ForgetfulStore),
    "emit before commit": Parts(driver=EagerDriver),
    "ancestry check off": Parts(target=CredulousTarget, link=CredulousLink),
    "ancestry check off at the gateway": Parts(client=CredulousClient),
}
