"""The report says what ran and what was found, and nothing that did not happen."""

from __future__ import annotations

import json
from dataclasses import replace

from seqmtp_serve.fault_points import FaultPoint
from tests.chaos.checker import Kind, Violation
from tests.chaos.rig.campaign import FaultResult
from tests.chaos.rig.faults import ROLES, Fault, every_pair
from tests.chaos.rig.page import as_page
from tests.chaos.rig.report import as_json, spread
from tests.chaos.rig.run import Outcome
from tests.chaos.simulation.sweep import Sweep

SWEEP = Sweep(num_schedules=120, seconds=2.0, failures={}, kinds={}, met={"replays": 3})
UNPLUGGED = Fault(role="target", how="partition", point=FaultPoint.BEFORE_COMMIT)
CAUGHT = Sweep(num_schedules=10, seconds=1.0, failures={4: ("bad",)}, kinds={"lost": 1}, met={})


def result(role: str, *silence_s: float, missed: bool = False) -> FaultResult:
    fault = Fault(role=role, how="kill", point=FaultPoint.BEFORE_COMMIT)
    return FaultResult(
        fault=fault, num_streams=4, breaks=("lost",), silence_s=silence_s, resumes_s=(0.2,), missed=missed
    )


def outcome(*violations: Violation) -> Outcome:
    results = (result("target", 1.0, 3.0), result("store", 0.5), result("proposer", missed=True))
    return Outcome(
        results=results,
        violations=violations,
        num_disconnects=5,
        num_streams=17,
        num_rows=100,
        num_commits=120,
        seconds=9.0,
        held={"target-1 tasks": (7, 6)},
    )


def test_a_fault_that_found_nobody_counts_no_stream() -> None:
    report = as_json(outcome(), SWEEP, {"control": CAUGHT}, {"C1": (0.2, 0.3)}, {"date": "today"})
    assert json.loads(json.dumps(report)) == report
    assert (report["rig"]["faulted_streams"], report["rig"]["faulted_streams_under_way"]) == (8, 3)
    assert report["longest_silence_s"]["target"]["kill"] == {"p50": 2.0, "p95": 2.9, "max": 3.0, "number": 2}
    assert "proposer" not in report["longest_silence_s"]
    assert report["simulation"]["schedules_per_minute"] == 3600
    assert report["negative_controls"]["control"]["schedules_with_violations"] == 1


def test_recovery_counts_losses_wherever_they_happened_and_names_its_bar() -> None:
    unplugged = replace(outcome(), results=(replace(result("target", 2.0), fault=UNPLUGGED),))
    report = as_json(outcome(), SWEEP, {}, {"C1": (1.0,), "C3": (1.5,)}, {}, apart=unplugged)
    assert report["recovery_s"]["target"] == {
        "p50": 2.0,
        "p95": 2.9,
        "max": 3.0,
        "number": 3,
        "bar_p95": 3.0,
        "met": True,
    }
    assert report["added_by_class_ms"] == {"C3": {"p50": 0.5, "p95": 0.5}}
    assert report["network_partitions"]["longest_silence_s"]["target"]["partition"]["max"] == 2.0
    assert "<td>partition</td>" in as_page(report)


def test_a_report_without_partitions_says_why() -> None:
    report = as_json(outcome(), SWEEP, {}, {}, {}, apart="not allowed <here>")
    assert "not allowed &lt;here&gt;" in as_page(report)
    bad = replace(outcome(), violations=(Violation(kind=Kind.LOST, subject="stream-1", detail="row 3"),))
    assert '<p class="bad">1 violations' in as_page(as_json(outcome(), SWEEP, {}, {}, {}, apart=bad))


def test_the_page_names_the_verdict_and_needs_nothing_else() -> None:
    clean = as_page(as_json(outcome(), SWEEP, {}, {}, {"model": "<tiny>"}))
    assert "<td>target-1 tasks</td><td>7</td><td>6</td>" in clean
    assert '<p class="good">0 violations' in clean
    assert "&lt;tiny&gt;" in clean
    assert "http" not in clean
    bad = Violation(kind=Kind.LOST, subject="stream-1", detail="row 3")
    assert '<p class="bad">1 violations' in as_page(as_json(outcome(bad), SWEEP, {}, {}, {}))


def test_spread_of_few_values() -> None:
    assert spread([]) is None
    assert spread([2.0]) == {"p50": 2.0, "p95": 2.0, "max": 2.0, "number": 1}


def test_every_role_is_killed_and_stopped_at_every_point() -> None:
    pairs = {(fault.role, fault.how, fault.point) for fault in every_pair()}
    assert {(role, how, point) for role in ROLES for how in ("kill", "stop") for point in FaultPoint} <= pairs
