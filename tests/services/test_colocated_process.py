"""`--proposer colocated`: one process fewer, and the text of plain decoding with drafts in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from seqmtp_serve.request import Request, SamplingParams
from services.settings import EngineSettings, ModelSettings, Settings, SpeculationSettings
from tests.services.cluster import cluster
from tests.services.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow


def asking(name: str, depth: int) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, max_depth=depth)
    return Request(request_id=name, prompt_ids=tuple(range(2, 12)), params=params)


async def test_target_and_coordinator_alone_speculate_and_change_no_token(tmp_path: Path) -> None:
    settings = Settings(
        model=ModelSettings(path=str(write_tiny_model(tmp_path)), mtp=str(tmp_path / "tiny-mtp")),
        engine=EngineSettings(weights="fp32", max_model_len=128),
        speculation=SpeculationSettings(proposer="colocated"),
        data_dir=tmp_path,
    )
    assert not settings.wants_proposer_process
    with cluster(tmp_path, settings) as workers:
        workers.start("target", "coordinator")
        status = await workers.ready()
        assert status.mtp_ready
        plain = [row async for row in workers.generate(asking("plain", 0))]
        deep = [row async for row in workers.generate(asking("deep", 3))]
    tokens = [[token for row in rows for token in row.tokens] for rows in (plain, deep)]
    assert tokens[0] == tokens[1]
    assert sum(row.drafted for row in plain) == 0
    assert sum(row.accepted for row in deep) > 0
