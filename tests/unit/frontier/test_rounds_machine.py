"""Every round a request can have, in any order, with any fault between any two stages: the invariants hold throughout.

A synchronous driver around the decision modules, a strict target and the store in memory. Hypothesis chooses what
happens next: steps of two cohorts that overlap, lost targets, lost commits and replies, cancels, takeovers by another
owner, late and forged results. What may never be seen: a token that is not in the record, or a text that plain decoding
would not have given.
"""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from seqmtp_serve.config import SchedulerConfig
from seqmtp_serve.errors import ContextOverflow, ProtocolError
from seqmtp_serve.fake import FAKE_INFO, FakeTargetGroup, fake_piece, fake_text
from seqmtp_serve.frontier.ancestry import extend_digest
from seqmtp_serve.frontier.depth_choice import DepthChoice
from seqmtp_serve.frontier.finish import FinishChecker
from seqmtp_serve.frontier.memory_store import MemoryFrontierStore
from seqmtp_serve.frontier.recovery import frontier_from
from seqmtp_serve.frontier.round import State
from seqmtp_serve.frontier.scheduler import BatchScheduler, ChooseDepths
from seqmtp_serve.frontier.sequence import Sequence
from seqmtp_serve.ports import Commit, CommitResult, RowResult, StepPlan, StepReport
from seqmtp_serve.request import CommittedRow, Request, SamplingParams

COHORTS = st.integers(0, 1)
Answer = TypeVar("Answer")


def now(call: Coroutine[Any, Any, Answer]) -> Answer:
    """The answer of a call that never waits."""
    try:
        call.send(None)
    except StopIteration as stop:
        answer: Answer = stop.value
        return answer
    raise AssertionError("the call waited")


def all_at(depth: int) -> ChooseDepths:
    """Every round at one depth."""
    return lambda coming: DepthChoice(depths=(depth,) * len(coming), reason="")


@dataclass
class Cohort:
    """What one cohort has under way: a step without its report delivered, then rows without their commit."""

    plan: StepPlan | None = None
    report: StepReport | None = None
    chosen: list[tuple[Sequence, CommittedRow]] = field(default_factory=list)


class RoundsMachine(RuleBasedStateMachine):
    @initialize(num_pages=st.integers(8, 24), max_batch=st.integers(1, 5), max_depth=st.integers(0, 3))
    def start(self, num_pages: int, max_batch: int, max_depth: int) -> None:
        config = SchedulerConfig(max_batch=max_batch, step_tokens=24, prefill_chunk=4, cohorts=2, max_depth=max_depth)
        self.info = replace(FAKE_INFO, num_pages=num_pages)
        self.target = FakeTargetGroup(self.info)
        self.scheduler = BatchScheduler(config, self.info)
        self.store = MemoryFrontierStore()
        self.cohorts = [Cohort(), Cohort()]
        self.sequences: dict[str, Sequence] = {}
        self.shown: dict[str, list[CommittedRow]] = {}
        self.taken_over: set[str] = set()
        self.bootstraps: dict[str, int] = {}
        self.old: list[tuple[int, RowResult]] = []
        self.announced: dict[str, int] = {}
        self.num_steps = 0

    # ---- what happens --------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.shown) < 8)
    @rule(
        prompt=st.integers(1, 24)
        .flatmap(lambda size: st.lists(st.integers(0, 25), min_size=size, max_size=size))
        .map(tuple),
        max_tokens=st.integers(1, 16),
        min_tokens=st.integers(0, 3),
        max_depth=st.integers(0, 3),
        stop=st.sampled_from([(), ("e",), ("ab", "c")]),
        eos=st.sampled_from([(), (3,), (3, 17)]),
    )
    def submit(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        min_tokens: int,
        max_depth: int,
        stop: tuple[str, ...],
        eos: tuple[int, ...],
    ) -> None:
        params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, max_depth=max_depth, stop=stop)
        name = f"r{len(self.shown)}"
        request = Request(request_id=name, prompt_ids=prompt, params=params, eos_token_ids=eos)
        try:
            self.scheduler.accepts(request, len(self.sequences))
        except ContextOverflow:
            info = self.info
            assert len(prompt) + max_tokens > info.num_pages * info.page_size - info.max_depth
            return
        frontier = frontier_from(now(self.store.acquire(request, "us", 1.0)))
        sequence = Sequence(
            request=request,
            frontier=frontier,
            checker=FinishChecker(request),
            decode=fake_piece,
            arrival=len(self.shown),
        )
        self.sequences[name], self.shown[name] = sequence, []
        self.scheduler.add(sequence)

    @rule(cohort=COHORTS, depth=st.integers(0, 3))
    def send_step(self, cohort: int, depth: int) -> None:
        mine = self.cohorts[cohort]
        if mine.report is None and not mine.chosen:
            self.num_steps += 1
            mine.plan = self.scheduler.plan(cohort, self.num_steps, all_at(depth))
            if mine.plan is not None:
                self.check_plan(mine.plan)
                mine.report = self.target.run(mine.plan)

    @rule(cohort=COHORTS)
    def deliver_report(self, cohort: int) -> None:
        mine = self.cohorts[cohort]
        if mine.plan is None or mine.report is None:
            return
        for result in mine.report.rows:
            assert result.error is None, result
            self.old.append((mine.plan.step_id, result))
            sequence = self.sequences.get(result.ref.request_id)
            if sequence is None or sequence.step_id != mine.plan.step_id:
                continue  # ended, or its target was lost and this answer with it
            row = sequence.settle(mine.plan.step_id, result)
            if row is not None:
                mine.chosen.append((sequence, row))
        assert not self.scheduler.in_step(mine.plan.step_id)
        mine.plan = mine.report = None

    @rule(cohort=COHORTS, losses=st.lists(st.sampled_from(["call", "reply"]), max_size=2))
    def commit(self, cohort: int, losses: list[str]) -> None:
        mine = self.cohorts[cohort]
        commits = [
            Commit(
                epoch=sequence.frontier.epoch,
                row=row,
                digest=extend_digest(sequence.frontier.digest, row.tokens),
            )
            for sequence, row in mine.chosen
        ]
        for loss in losses:
            if loss == "reply":
                now(self.store.commit(commits))
        answers = now(self.store.commit(commits))
        for (sequence, row), answer in zip(mine.chosen, answers, strict=True):
            name = row.request_id
            if name not in self.sequences:
                fenced = {CommitResult.FENCED} if name in self.taken_over else set()
                assert answer in {CommitResult.GONE, CommitResult.DUP} | fenced
            elif answer in (CommitResult.OK, CommitResult.DUP):
                self.scheduler.committed(sequence, row)
                self.shown[name].append(row)
                self.bootstraps[name] = self.bootstraps.get(name, 0) + (row.origins == "b")
                if row.finish is not None:
                    del self.sequences[name]
            else:
                assert answer is CommitResult.FENCED
                assert name in self.taken_over
                self.scheduler.drop(self.sequences.pop(name))
        mine.chosen = []

    @rule()
    def lose_target(self) -> None:
        self.target.lose()
        self.target.restore()
        self.scheduler.lose_target()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.sequences)))
        now(self.store.cancel(name))
        self.scheduler.drop(self.sequences.pop(name))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def another_owner_takes_over(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.sequences)))
        before = self.sequences[name].frontier
        snapshot = now(self.store.acquire(self.sequences[name].request, "them", 1.0))
        self.taken_over.add(name)
        assert snapshot.epoch > before.epoch
        assert frontier_from(snapshot).output_ids == before.output_ids

    @precondition(lambda self: self.old)
    @rule(data=st.data())
    def late_or_forged_results_change_nothing(self, data: st.DataObject) -> None:
        step_id, result = data.draw(st.sampled_from(self.old))
        sequence = self.sequences.get(result.ref.request_id)
        if sequence is None:
            return
        forged = data.draw(st.sampled_from(["late", "digest", "version", "epoch", "length", "depth"]))
        if forged != "late" and sequence.state in (State.VERIFYING, State.PREFILLING) and sequence.step_id is not None:
            step_id, ref, whole = sequence.step_id, sequence.frontier.ref, (1,) * (sequence.asked_depth + 2)
            result = {
                "digest": RowResult(ref=replace(ref, digest=bytes(16)), tokens=(1,)),
                "version": RowResult(ref=replace(ref, version=ref.version + 1), tokens=(1,)),
                "epoch": RowResult(ref=replace(ref, epoch=ref.epoch + 1), tokens=(1,)),
                "length": RowResult(ref=ref, tokens=(1, 2), accepted=0, drafted=0),
                "depth": RowResult(ref=ref, tokens=whole, accepted=len(whole) - 1, drafted=len(whole) - 1),
            }[forged]
        before = (sequence.state, sequence.frontier, sequence.step_id, sequence.checker.num_tokens)
        with pytest.raises(ProtocolError):
            sequence.settle(step_id, result)
        assert (sequence.state, sequence.frontier, sequence.step_id, sequence.checker.num_tokens) == before

    # ---- what must hold ------------------------------------------------------------------------------------------

    def check_plan(self, plan: StepPlan) -> None:
        """Each request at most once, at its very state, within the budget; nothing for one that has ended."""
        asked = [item.ref for item in (*plan.prefill, *plan.verify)]
        assert len({ref.request_id for ref in asked}) == len(asked)
        for ref in asked:
            assert ref == self.sequences[ref.request_id].frontier.ref
        for item in plan.verify:
            sequence = self.sequences[item.ref.request_id]
            assert not sequence.frontier.finished
            assert item.depth + 1 <= sequence.remaining
            assert item.depth <= self.announced[item.ref.request_id]
        for item in (*plan.prefill, *plan.verify):
            assert item.next_depth is not None
            self.announced[item.ref.request_id] = item.next_depth
        rows = sum(item.stop - item.start for item in plan.prefill) + sum(item.depth + 1 for item in plan.verify)
        assert rows <= self.scheduler.config.step_tokens

    @invariant()
    def scheduler_is_sound(self) -> None:
        self.scheduler.check()
        assert {*self.scheduler.running, *self.scheduler.waiting} == set(self.sequences.values())

    @invariant()
    def shown_rows_are_the_record_and_the_plain_text(self) -> None:
        for name, rows in self.shown.items():
            snapshot = now(self.store.snapshot(name))
            assert snapshot is not None
            assert snapshot.rows[: len(rows)] == tuple(rows)
            assert len(snapshot.rows) <= len(rows) + 1
            text, whole = [token for row in rows for token in row.tokens], fake_text(snapshot.request)
            assert text == list(whole[: len(text)])
            ended = bool(rows) and rows[-1].finish is not None
            assert ended == (len(text) == len(whole))
            assert self.bootstraps.get(name, 0) == (1 if rows else 0)
            rounds = [row for row in rows if row.origins != "b"]
            assert len(text) == self.bootstraps.get(name, 0) + sum(len(row.tokens) for row in rounds)

    @invariant()
    def target_holds_p_and_never_more_than_was_reserved(self) -> None:
        held_pages = 0
        for name, held in self.target.held.items():
            held_pages += -(-held.num_rows // self.info.page_size)
            sequence = self.sequences.get(name)
            at_rest = sequence is not None and sequence.state is State.PROPOSING
            if sequence is not None and at_rest and sequence.publish is None:
                assert held.kv_len == sequence.frontier.kv_len
                assert held.output_ids == list(sequence.frontier.output_ids)
        assert held_pages <= self.info.num_pages

    def teardown(self) -> None:
        """Whatever happened, everyone left ends with the whole text: nobody starves."""
        if not hasattr(self, "scheduler"):
            return
        for name in self.taken_over & self.sequences.keys():
            self.cancel_one(name)
        for _ in range(600):
            for cohort in (0, 1):
                self.send_step(cohort, 3)
                self.deliver_report(cohort)
                self.commit(cohort, [])
        assert not self.sequences
        assert not self.target.held
        assert self.scheduler.free_pages == self.info.num_pages

    def cancel_one(self, name: str) -> None:
        now(self.store.cancel(name))
        self.scheduler.drop(self.sequences.pop(name))


covers = (73, 75, 76, 77, 78, 79, 80, 81, 85, 87, 88, 89, 90, 110, 124, 126, 129, 130, 152)
TestRounds = pytest.mark.covers(*covers)(RoundsMachine.TestCase)
TestRounds.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
