"""The short form of `make chaos`: real processes, a handful of faults, the same verdict. See rig/run.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from seqmtp_serve.fault_points import FaultPoint
from tests.chaos.checker import Kind
from tests.chaos.rig.faults import Fault
from tests.chaos.rig.run import run

SHORT = (
    Fault(role="coordinator", how="kill", point=FaultPoint.AFTER_COMMIT),
    Fault(role="target", how="kill", point=FaultPoint.BEFORE_COMMIT),
    Fault(role="proposer", how="stop", point=FaultPoint.BEFORE_PREPARE),
    Fault(role="store", how="lose replies", point=FaultPoint.BEFORE_COMMIT),
    Fault(role="store", how="kill", point=FaultPoint.AFTER_PUBLISH),
)


@pytest.mark.slow
@pytest.mark.covers(88, 90, 126, 152, 155)
@pytest.mark.timeout(600)
async def test_a_few_faults_cost_no_token(tmp_path: Path) -> None:
    outcome = await run(
        tmp_path,
        SHORT,
        num_streams=4,
        num_disconnects=16,
        seed=1,
        num_wishes=8,
        replay_window_s=6.0,
        reader_grace_s=4.0,
    )
    assert outcome.violations == ()
    assert not [result.fault for result in outcome.results if result.missed]
    assert sum(len(result.silence_s) for result in outcome.results) > len(SHORT)


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
