"""The round driver, the store and the protocol of the target under thousands of fault schedules, each from one seed.

A seed that fails is replayed with `python -m tests.chaos.simulation.sweep SEED`.
"""

from __future__ import annotations

import logging

import pytest

from seqmtp_serve.fault_points import FaultPoint
from tests.chaos.checker import Kind
from tests.chaos.simulation.controls import CONTROLS
from tests.chaos.simulation.parts import Parts
from tests.chaos.simulation.shared_call import SharedClient
from tests.chaos.simulation.sweep import sweep
from tests.chaos.simulation.world import simulate

NUM_SCHEDULES = 400
MET = (
    "commits.dup",
    "commits.fenced",
    "coordinators asked to end",
    "drafts refused",
    "late_results",
    "refused.stale_version",
    "replays",
    "rows refused",
    "store_retries",
    "target_losses",
    *(f"died {point}" for point in FaultPoint),
)
CAUGHT_AS = {
    "epoch check off": Kind.EPOCH_BACK,
    "commit not idempotent": Kind.VERSION_BACK,
    "emit before commit": Kind.UNCOMMITTED,
    "ancestry check off": Kind.ALTERED,
    "ancestry check off at the gateway": Kind.ALTERED,
}


@pytest.fixture(autouse=True)
def _quiet():
    """A killed driver logs every task that dies in it."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.covers(85, 88, 126, 130, 152)
def test_every_schedule_is_exactly_once_and_met_every_kind_of_trouble() -> None:
    result = sweep(range(NUM_SCHEDULES))
    assert not result.failures, "replay one with: python -m tests.chaos.simulation.sweep SEED"
    assert [name for name in MET if not result.met.get(name)] == []


@pytest.mark.covers(85, 88)
def test_every_schedule_is_exactly_once_when_all_clients_share_a_call() -> None:
    result = sweep(range(NUM_SCHEDULES), Parts(client=SharedClient))
    assert not result.failures
    assert [name for name in MET if not result.met.get(name)] == []


def test_a_seed_is_a_schedule() -> None:
    for seed in range(5):
        assert simulate(seed) == simulate(seed)
    assert simulate(0) != simulate(1)


@pytest.mark.parametrize("control", CONTROLS)
def test_a_broken_service_is_caught(control: str) -> None:
    result = sweep(range(100), CONTROLS[control])
    assert result.kinds.get(CAUGHT_AS[control].value), f"the checker saw nothing wrong with: {control}"
