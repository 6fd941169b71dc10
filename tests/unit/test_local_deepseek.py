"""A model of the DeepSeek-V3 layout through driver, scheduler, engines and store: the text is the plain one's."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from seqmtp_serve.config import SchedulerConfig
from seqmtp_serve.engine.proposer import ProposerEngine
from seqmtp_serve.engine.target import TargetEngine
from seqmtp_serve.local import DeferredProposer, LocalService
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.mtp_families import FAMILIES
from seqmtp_serve.model.synthetic import TINY_V3, mtp_tensors, target_tensors
from seqmtp_serve.oracle import generate as plain_text
from seqmtp_serve.request import CommittedRow, Request
from tests.unit.engine.engines import config, request, seeded
from tests.unit.released_files import write_released

SCHEDULER = SchedulerConfig(max_batch=8, step_tokens=48, prefill_chunk=16)
TARGET = target_tensors(TINY_V3)
MTP = mtp_tensors(TARGET, TINY_V3, num_modules=2)
RELEASED = FAMILIES["deepseek_v3"].contract
CONTRACTS = {
    "released": RELEASED,
    "own": FAMILIES["seqmtp"].contract,
    "chain of two": replace(RELEASED, num_modules=2, rollout="chain"),
    "two, recurrent": replace(RELEASED, num_modules=2),
}


def engine(mtp: MtpConfig | None = RELEASED, **fields: object) -> TargetEngine:
    proposer = None
    if mtp is not None:
        proposer = DeferredProposer(ProposerEngine(config(**fields), TINY_V3, mtp, MTP))
    return TargetEngine(config(**fields), TINY_V3, TARGET, proposer, name="tiny-v3", fingerprint="f")


async def generate_all(built: TargetEngine, requests: list[Request]) -> tuple[list[list[int]], dict[str, float]]:
    async with asyncio.timeout(240), LocalService.running(built, lambda _: chr, scheduler=SCHEDULER) as service:
        results: list[list[CommittedRow]] = await asyncio.gather(*map(service.generate, requests))
        return [[token for row in rows for token in row.tokens] for rows in results], dict(
            service.driver.status().counters
        )


def batch(depth: int | None = None, max_tokens: int = 20) -> list[Request]:
    """Greedy and seeded requests, of one depth or of depths 0 to 3."""
    return [
        replace(
            make(index, max_tokens=max_tokens, max_depth=index % 4 if depth is None else depth),
            request_id=f"{make.__name__}-{index}",
        )
        for index in range(4)
        for make in (request, seeded)
    ]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return [plain_text(TARGET, TINY_V3, one) for one in batch()]


@pytest.mark.covers(72, 93, 94, 157)
@pytest.mark.parametrize("contract", CONTRACTS)
async def test_text_is_the_oracles_at_every_depth_in_one_batch(contract: str, plain: list[list[int]]) -> None:
    texts, counters = await generate_all(engine(CONTRACTS[contract]), batch())
    assert texts == plain
    assert counters["accepted"] > 0
    assert counters["rounds.rejected"] > 0
    assert "refused.stale_version" not in counters


@pytest.mark.covers(72, 151)
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
async def test_every_depth_gives_the_same_text(depth: int, plain: list[list[int]]) -> None:
    texts, counters = await generate_all(engine(), batch(depth))
    assert texts == plain
    assert (counters.get("drafted", 0) > 0) == (depth > 0)


@pytest.mark.covers(65)
async def test_without_the_module_the_text_is_the_same(plain: list[list[int]]) -> None:
    texts, _ = await generate_all(engine(None), batch())
    assert texts == plain


@pytest.mark.covers(62, 65)
@pytest.mark.parametrize("whole", [True, False], ids=["both gates pass", "the module misses a tensor"])
async def test_released_files_are_served_as_they_are(whole: bool, tmp_path: Path, plain: list[list[int]]) -> None:
    """Opened from a folder, with the contract of its family. Without the module the target still serves, at depth 0."""
    tensors = TARGET | {name: MTP[name] for name in MTP if ".layers.4." not in name}
    if not whole:
        del tensors["model.layers.3.hnorm.weight"]
    folder = write_released(tmp_path / "tiny-v3", tensors, TINY_V3).folder
    async with (
        asyncio.timeout(240),
        LocalService.open(str(folder), decoder=lambda *_: chr, engine=config(), scheduler=SCHEDULER) as service,
    ):
        results = await asyncio.gather(*map(service.generate, batch()))
        counters = dict(service.driver.status().counters)
    assert [[token for row in rows for token in row.tokens] for rows in results] == plain
    by_module = counters["accepted"] - counters.get("copied.accepted", 0)
    assert (by_module > 0) == whole


@pytest.mark.covers(85, 90)
async def test_preemption_leaves_no_trace_in_the_text(plain: list[list[int]]) -> None:
    texts, counters = await generate_all(engine(num_pages=18), batch())
    assert texts == plain
    assert counters["preemptions"] > 0
