"""The short form of `make chaos`: real processes, a handful of faults, the same verdict. See rig/run.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from seqmtp_serve.fault_points import FaultPoint
from services.store.durability import Durability
from tests.chaos.checker import Kind
from tests.chaos.rig.faults import Fault, fail_overs
from tests.chaos.rig.namespaces import why_not
from tests.chaos.rig.run import run

NOTICED_S = 0.5  # a silence that only a lost link explains: a round takes milliseconds

SHORT = (
    Fault(role="coordinator", how="kill", point=FaultPoint.AFTER_COMMIT),
    Fault(role="target", how="kill", point=FaultPoint.BEFORE_COMMIT),
    Fault(role="proposer", how="stop", point=FaultPoint.BEFORE_PREPARE),
    Fault(role="store", how="lose replies", point=FaultPoint.BEFORE_COMMIT),
    Fault(role="store", how="kill", point=FaultPoint.AFTER_PUBLISH),
    *(
        Fault(role=role, how="drain", point=FaultPoint.AFTER_COMMIT)
        for role in ("proposer", "target", "coordinator", "gateway")
    ),
    *(Fault(role=role, how="stay stopped", point=FaultPoint.AFTER_VERIFY) for role in ("coordinator", "gateway")),
)


@pytest.mark.slow
@pytest.mark.covers(88, 90, 126, 152, 155)
@pytest.mark.timeout(600)
async def test_a_few_faults_cost_no_token(tmp_path: Path) -> None:
    outcome = await run(
        tmp_path,
        SHORT,
        num_streams=4,
        num_disconnects=48,
        seed=1,
        num_wishes=8,
        replay_window_s=6.0,
        reader_grace_s=4.0,
    )
    assert outcome.violations == ()
    assert {name.rpartition(" ")[2] for name in outcome.held} >= {"tasks", "open_files", "pages", "readers", "keys"}
    assert not [result.fault for result in outcome.results if result.missed]
    assert sum(len(result.silence_s) for result in outcome.results) > len(SHORT)
    for result in outcome.results:
        if result.fault.how == "drain":  # no stream is broken; a gateway's own are told to go on at the other one
            assert all(result.fault.role == "gateway" and "draining" in reason for reason in result.breaks)


@pytest.mark.slow
@pytest.mark.covers(88, 152)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("durability", ["C1", "C3"])
async def test_a_store_that_fails_over_costs_no_token(tmp_path: Path, durability: Durability) -> None:
    """C3: all that was shown is in the replica. C1: some is not, and comes from its owner's memory."""
    faults = fail_overs()[:3]  # one alone may come between two rows: then nothing is forgotten
    outcome = await run(
        tmp_path,
        faults,
        num_streams=8,
        num_disconnects=0,
        seed=3,
        num_wishes=4,
        replay_window_s=6.0,
        durability=durability,
        standby=True,
    )
    assert outcome.violations == ()
    assert len(outcome.results) == len(faults)
    assert not any(result.missed for result in outcome.results)
    assert all(result.silence_s for result in outcome.results)
    num_forgotten = sum(result.num_forgotten for result in outcome.results)
    assert (num_forgotten > 0) == (durability == "C1")


@pytest.mark.slow
@pytest.mark.covers(88, 152)
@pytest.mark.timeout(600)
async def test_a_worker_cut_off_from_the_network_costs_no_token(tmp_path: Path) -> None:
    """Packets vanish and nobody is told. Who was cut off finds itself replaced when it is back."""
    if why := why_not():
        pytest.skip(f"no network namespaces here: {why}")
    faults = [
        Fault(role="coordinator", how="partition", point=FaultPoint.BEFORE_COMMIT),
        Fault(role="target", how="stay partitioned", point=FaultPoint.AFTER_VERIFY),
    ]
    outcome = await run(
        tmp_path,
        faults,
        num_streams=4,
        num_disconnects=0,
        seed=2,
        num_wishes=8,
        replay_window_s=6.0,
        reader_grace_s=4.0,
        apart=True,
    )
    assert outcome.violations == ()
    assert not [result.fault for result in outcome.results if result.missed]
    assert all(max(result.silence_s) > NOTICED_S for result in outcome.results), "nobody felt it"


CONTROLS = {
    "emit before commit": Fault(role="store", how="kill", point=FaultPoint.BEFORE_COMMIT),
    "commit not idempotent": Fault(role="store", how="lose replies", point=FaultPoint.BEFORE_COMMIT),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("control", CONTROLS)
async def test_a_broken_coordinator_is_caught_by_the_same_checker(tmp_path: Path, control: str) -> None:
    faults = (CONTROLS[control],)
    outcome = await run(tmp_path, faults, num_streams=3, num_disconnects=0, seed=1, num_wishes=3, control=control)
    assert Kind.UNCOMMITTED in {violation.kind for violation in outcome.violations}
