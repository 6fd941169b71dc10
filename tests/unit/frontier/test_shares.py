"""How a group's step is shared out: every directive reaches the one rank that holds the request, and none is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seqmtp_serve.frontier.shares import Roster, group_info
from seqmtp_serve.ports import (
    Admit,
    ExpertWork,
    Prefill,
    Publish,
    Release,
    RowResult,
    StepCosts,
    StepPlan,
    StepReport,
    TargetInfo,
    Verify,
)
from seqmtp_serve.request import Ref, Request, SamplingParams


def ref(name: str, *, version: int = 0, epoch: int = 1) -> Ref:
    return Ref(request_id=name, epoch=epoch, version=version, digest=b"")


def admit(name: str, *, epoch: int = 1) -> Admit:
    request = Request(request_id=name, prompt_ids=(1, 2), params=SamplingParams(max_tokens=4))
    return Admit(ref=ref(name, epoch=epoch), request=request)


def report(*rows: RowResult, free_pages: int = 100, **costs: float) -> StepReport:
    parts = StepCosts(**costs)  # type: ignore[arg-type]
    return StepReport(step_id=1, rows=rows, costs=parts, free_pages=free_pages, proposer_ready=True)


def run(roster: Roster, plan: StepPlan, *reports: StepReport) -> list[StepPlan]:
    """Split and, with empty reports unless others are given, merge."""
    shares = roster.split(plan)
    roster.merge(plan, reports or [report()] * len(shares))
    return shares


def ranks_of(shares: list[StepPlan], field: str) -> dict[str, list[int]]:
    """Request id to the ranks whose share names it."""
    found: dict[str, list[int]] = {}
    for rank, share in enumerate(shares):
        for each in getattr(share, field):
            found.setdefault(each.request_id if field == "release" else each.ref.request_id, []).append(rank)
    return found


def placed(num_ranks: int, *names: str) -> tuple[Roster, dict[str, int]]:
    roster = Roster([100] * num_ranks)
    shares = run(roster, StepPlan(step_id=1, admit=tuple(admit(name) for name in names)))
    return roster, {name: ranks[0] for name, ranks in ranks_of(shares, "admit").items()}


def test_new_requests_go_where_the_fewest_are():
    assert placed(3, "a", "b", "c", "d")[1] == {"a": 0, "b": 1, "c": 2, "d": 0}


def test_equally_busy_ranks_are_told_apart_by_their_free_pages():
    roster, _ = placed(3)
    run(roster, StepPlan(step_id=1), report(free_pages=5), report(free_pages=9), report(free_pages=9))
    assert ranks_of(run(roster, StepPlan(step_id=2, admit=(admit("a"),))), "admit") == {"a": [1]}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_request_stays_with_its_rank_and_all_ranks_get_a_share(num_ranks: int):
    names = ("a", "b", "c", "d", "e")
    roster, homes = placed(num_ranks, *names)
    plan = StepPlan(
        step_id=7,
        publish=tuple(Publish(ref=ref(name), keep=1) for name in names),
        prefill=(Prefill(ref=ref("a"), start=0, stop=2, last=True),),
        verify=tuple(Verify(ref=ref(name), depth=3) for name in names[1:]),
        deadline_ms=12.0,
    )
    shares = run(roster, plan)
    assert ranks_of(shares, "publish") == {name: [homes[name]] for name in names}
    assert ranks_of(shares, "prefill") == {"a": [homes["a"]]}
    assert ranks_of(shares, "verify") == {name: [homes[name]] for name in names[1:]}
    assert [(share.step_id, share.deadline_ms) for share in shares] == [(7, 12.0)] * num_ranks
    assert {verify.depth for share in shares for verify in share.verify} == {3}, "one depth in all shares"


def test_a_released_request_is_forgotten_and_an_old_release_is_not_one():
    roster, homes = placed(2, "a", "b")
    run(roster, StepPlan(step_id=2, admit=(admit("b", epoch=5),)))
    assert homes["b"] == 1
    stale = run(roster, StepPlan(step_id=3, release=(Release(request_id="b", epoch=4),)))
    assert ranks_of(stale, "release") == {"b": [1]}
    assert ranks_of(run(roster, StepPlan(step_id=4, verify=(Verify(ref=ref("b"), depth=1),))), "verify") == {"b": [1]}
    run(roster, StepPlan(step_id=5, release=(Release(request_id="b", epoch=5),)))
    assert ranks_of(run(roster, StepPlan(step_id=6, verify=(Verify(ref=ref("b"), depth=1),))), "verify") == {"b": [0]}


def test_release_and_admission_in_one_plan_move_a_request():
    roster, _ = placed(2, "a", "b")
    plan = StepPlan(step_id=2, release=(Release(request_id="b", epoch=1),), admit=(admit("c"), admit("b", epoch=2)))
    shares = run(roster, plan)
    assert ranks_of(shares, "release") == {"b": [1]}
    assert ranks_of(shares, "admit") == {"c": [1], "b": [0]}


def test_the_release_of_a_request_nobody_holds_goes_to_all():
    roster, _ = placed(3)
    shares = run(roster, StepPlan(step_id=1, release=(Release(request_id="x", epoch=1),)))
    assert ranks_of(shares, "release") == {"x": [0, 1, 2]}


@pytest.mark.parametrize("code", ["overloaded", "internal_error"])
def test_a_refused_admission_may_go_elsewhere_next_time(code: str):
    roster, _ = placed(2, "a")
    refused = report(RowResult(ref=ref("b"), error=code))
    assert ranks_of(run(roster, StepPlan(step_id=2, admit=(admit("b"),)), report(), refused), "admit") == {"b": [1]}
    run(roster, StepPlan(step_id=3), report(free_pages=200), report(free_pages=0))
    assert ranks_of(run(roster, StepPlan(step_id=4, admit=(admit("c"),))), "admit") == {"c": [1]}, "b holds no place"


def test_a_refused_round_does_not_move_a_request():
    roster, homes = placed(2, "a", "b")
    stale = report(RowResult(ref=ref("b"), error="stale_version"))
    run(roster, StepPlan(step_id=2, verify=(Verify(ref=ref("b"), depth=1),)), report(), stale)
    shares = run(roster, StepPlan(step_id=3, verify=(Verify(ref=ref("b"), depth=1),)))
    assert ranks_of(shares, "verify") == {"b": [homes["b"]]}


def test_reports_become_one_with_the_costs_of_the_slowest_rank():
    roster, _ = placed(2, "a", "b")
    rows = [RowResult(ref=ref("a"), tokens=(1,)), RowResult(ref=ref("b"), tokens=(2,))]
    work = ExpertWork(num_pairs=2, num_touched=1, sent_bytes=8)
    first = report(rows[0], free_pages=3, forward=5.0, pack=1.0, mtp=2.0, num_rows=4)
    second = report(rows[1], free_pages=4, forward=4.0, draft_wait=3.0, mtp=2.5, num_rows=1)
    merged = roster.merge(
        StepPlan(step_id=9),
        [replace(first, experts=(work,)), replace(second, experts=(work,), proposer_ready=False)],
    )
    assert (merged.step_id, merged.rows, merged.free_pages, merged.proposer_ready) == (9, tuple(rows), 7, False)
    assert merged.costs == StepCosts(forward=4.0, draft_wait=3.0, mtp=4.5, num_rows=5)
    assert merged.experts == (work, replace(work, rank=1)), "each rank's own, by its number"


def test_capacities_add_up_but_one_sequence_fits_one_rank():
    one = TargetInfo(
        group_id="g",
        model="m",
        max_model_len=1000,
        vocab_size=64,
        page_size=16,
        num_pages=40,
        max_batch=2,
        max_depth=3,
        numerics="invariant",
        manifest_fingerprint="f",
    )
    group = group_info((one, replace(one, num_pages=30)))
    assert (group.num_pages, group.max_batch, group.max_model_len) == (70, 4, 480)
    assert group_info((one,)) == replace(one, max_model_len=640)
