"""The account of rounds, and the speed-up formula on its worked example."""

from __future__ import annotations

import pytest

from seqmtp_serve.errors import AncestryMismatch, Fenced, InternalError, NotReady, Overloaded, StaleVersion
from seqmtp_serve.frontier.ledger import RECENT_STEPS, Ledger, RoundCosts, hidden_share, speedup
from seqmtp_serve.frontier.refusal import MAX_REPLAYS, Remedy, remedy
from seqmtp_serve.ports import ExpertWork, Prefill, RowResult, StepCosts, StepPlan, StepReport, Verify
from seqmtp_serve.request import CommittedRow, FinishReason, Ref

REF = Ref(request_id="r", epoch=1, version=1, digest=bytes(16))


def result(drafted: int, accepted: int) -> RowResult:
    return RowResult(ref=REF, tokens=tuple(range(accepted + 1)), drafted=drafted, accepted=accepted)


def row(one: RowResult, *, cut: int | None = None) -> CommittedRow:
    tokens = one.tokens[:cut]
    finish = None if cut is None else FinishReason.STOP
    return CommittedRow(
        request_id="r",
        version=2,
        tokens=tokens,
        drafted=one.drafted,
        accepted=min(one.accepted, len(tokens)),
        origins=("a" * one.accepted + "c")[: len(tokens)],
        finish=finish,
    )


def fill(ledger: Ledger, depth: int, round_ms: float, accepted: int = 0, *, batch: int = 1, steps: int = 8) -> None:
    costs = RoundCosts(verify=round_ms) if depth else RoundCosts(main=round_ms)
    for _ in range(steps):
        ledger.record_rounds(depth, [result(depth, accepted)] * batch, costs)


@pytest.mark.covers(102, 103)
def test_the_worked_example() -> None:
    costs = RoundCosts(mtp=2.0, verify=11.0)
    assert speedup(1.85, 10.0, costs) == pytest.approx(18.5 / 13)
    assert speedup(1.3, 10.0, costs) == pytest.approx(1.0)  # break-even at an acceptance of 0.3
    assert speedup(1.29, 10.0, costs) < 1.0 < speedup(1.31, 10.0, costs)


@pytest.mark.covers(102)
def test_a_step_is_split_into_disjoint_costs_that_add_up() -> None:
    step = StepCosts(forward=8.0, draft_wait=1.5, select=0.25, pack=0.5, mtp=4.0)
    plain = RoundCosts.of_step(step, depth=0, step_ms=11.0, commit_ms=2.0)
    deep = RoundCosts.of_step(step, depth=2, step_ms=11.0, commit_ms=2.0)
    assert (plain.main, plain.verify, deep.main, deep.verify) == (8.0, 0.0, 0.0, 8.0)
    for costs in (plain, deep):
        assert (costs.mtp, costs.pack, costs.sync, costs.round) == (1.5, 0.75, 2.75, 0.0)
        assert costs.total == pytest.approx(11.0 + 2.0)


@pytest.mark.covers(102)
def test_what_hid_behind_the_pass() -> None:
    """Verify 8, queue 5, drafts 4 of which 1.5 were waited for, 3.5 for all else: 7.5 beside the pass."""
    step = StepCosts(forward=8.0, draft_wait=1.5, select=0.25, pack=0.5, mtp=4.0, queued=5.0)
    for wall_ms, share in ((15.5, 0.0), (13.0, 1 / 3), (8.0, 1.0)):
        ledger = Ledger()
        assert hidden_share(ledger.counters()) is None
        ledger.record_overlap(step, round_ms=18.0, wall_ms=None)  # after a rest
        assert hidden_share(ledger.counters()) is None
        ledger.record_overlap(step, round_ms=18.0, wall_ms=wall_ms)
        assert ledger.counters()["overlap.other_ms"] == 7.5
        assert hidden_share(ledger.counters()) == pytest.approx(share)


@pytest.mark.covers(99, 100)
def test_experts_are_counted_by_rank_by_kind_of_pass_and_for_the_module_apart() -> None:
    ledger = Ledger()
    work = (
        ExpertWork(rank=0, num_pairs=8, num_touched=5, sent_bytes=100),
        ExpertWork(rank=1, num_pairs=4, num_touched=3, sent_bytes=50),
    )
    costs = StepCosts(mtp_touched=2.5, feed=0.25, fed_rows=3, fed_bytes=120)
    report = StepReport(step_id=1, rows=(), costs=costs, free_pages=1, proposer_ready=True, experts=work)
    verify, prefill = Verify(ref=REF, depth=2), Prefill(ref=REF, start=0, stop=1, last=True)
    for plan in (
        StepPlan(step_id=1, verify=(verify,)),
        StepPlan(step_id=2, verify=(verify,)),
        StepPlan(step_id=3, verify=(Verify(ref=REF, depth=0),)),
        StepPlan(step_id=4, verify=(verify,), prefill=(prefill,)),
    ):
        ledger.record_step(plan, report, step_ms=1.0, commit_ms=0.0)
    counters = ledger.counters()
    assert counters["experts.verify.rank0.touched"] == 10
    assert counters["experts.verify.rank1.sent_bytes"] == 100
    assert counters["experts.main.rank1.pairs"] == counters["experts.prefill.rank1.pairs"] == 4
    assert counters["experts.mtp.touched"] == 10.0
    assert (counters["hidden.rows"], counters["hidden.bytes"], counters["hidden.ms"]) == (12, 480, 1.0)


@pytest.mark.covers(95, 103, 110)
def test_progress_and_acceptance_by_position_are_unconditional() -> None:
    ledger = Ledger()
    results = [result(3, 3), result(3, 1), result(3, 0), result(2, 2), result(0, 0)]
    for one in results:
        ledger.record_row(row(one), one)
    cut = result(3, 3)
    ledger.record_row(row(cut, cut=2), cut)
    bootstrap = CommittedRow(request_id="r", version=1, tokens=(5,), origins="b")
    ledger.record_row(bootstrap, RowResult(ref=REF, tokens=(5,)))
    assert ledger.acceptance() == (4 / 5, 3 / 5, 2 / 4)
    counters = ledger.counters()
    assert counters["outputs"] == counters["bootstraps"] + counters["progress.delivered"] == 1 + 13
    assert counters["progress.verified"] == 15  # the cut round had verified two more
    kinds = [counters[name] for name in ("rounds", "rounds.accepted", "rounds.rejected", "rounds.plain")]
    assert kinds == [6, 3, 2, 1]
    assert (counters["drafted"], counters["accepted"]) == (14, 9)
    assert counters["finished.stop"] == 1


@pytest.mark.covers(103)
def test_speedup_compares_equal_batches_and_waits_for_both_sides() -> None:
    ledger = Ledger()
    fill(ledger, 0, 10.0, batch=1)
    fill(ledger, 1, 13.0, accepted=1, batch=2)
    assert ledger.speedup(1, 1) is None
    assert ledger.speedup(1, 2) is None
    fill(ledger, 1, 12.5, accepted=1, batch=1)
    assert ledger.speedup(1, 1) == pytest.approx(2 * 10.0 / 12.5)
    assert ledger.expected_r(1, 1) == 2.0
    assert ledger.costs(3, 1) is None


def test_old_costs_fade() -> None:
    ledger = Ledger()
    fill(ledger, 0, 100.0, steps=RECENT_STEPS)
    fill(ledger, 0, 10.0, steps=3 * RECENT_STEPS)
    costs = ledger.costs(0, 1)
    assert costs is not None
    assert 10.0 < costs.main < 20.0
    assert ledger.expected_r(0, 1) == 1.0


@pytest.mark.covers(85, 130)
def test_each_refusal_has_its_remedy() -> None:
    replays = [remedy(StaleVersion.code, refusals) for refusals in range(MAX_REPLAYS + 1)]
    assert replays == [*[Remedy.REPLAY] * MAX_REPLAYS, Remedy.FAIL]
    assert remedy(AncestryMismatch.code, 0) is Remedy.REPLAY
    assert remedy(Fenced.code, 3) is Remedy.LET_GO
    assert [remedy(Overloaded.code, 5), remedy(NotReady.code, 5)] == [Remedy.WAIT, Remedy.WAIT]
    assert [remedy(InternalError.code, 0), remedy("a code of the future", 0)] == [Remedy.FAIL, Remedy.FAIL]


def test_every_position_has_a_counter_from_the_start() -> None:
    """One that first appears at 1 hides that step from whoever subtracts two readings."""
    counters = Ledger(2).counters()
    assert [counters[f"{kind}.pos{position}"] for kind in ("drafted", "accepted") for position in (0, 1)] == [0.0] * 4
    assert Ledger(2).acceptance() == ()
