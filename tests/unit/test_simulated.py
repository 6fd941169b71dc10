"""The simulated target: declared costs, synthetic acceptance, a text known beforehand, and no way to miss it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seqmtp_serve.config import SchedulerConfig
from seqmtp_serve.errors import InvalidField
from seqmtp_serve.fake import FAKE_INFO, fake_piece
from seqmtp_serve.frontier.memory_store import MemoryFrontierStore
from seqmtp_serve.ports import Prefill, StepPlan, StepReport, TargetInfo, Verify
from seqmtp_serve.request import Ref, Request, SamplingParams
from seqmtp_serve.rounds import RoundDriver
from seqmtp_serve.simulated import SimulatedCosts, SimulatedEngine, simulated_text
from services.settings import EngineSettings, Settings, SimulatedSettings
from services.target.simulated import simulated_engine

COSTS = SimulatedCosts(step_ms=25.0, row_ms=0.5, draft_ms=2.0, acceptance=(0.9, 0.5))
INFO = replace(FAKE_INFO, max_model_len=4096, num_pages=4096, vocab_size=256)
REF = Ref(request_id="r", epoch=1, version=1, digest=bytes(16))


class Awaited:
    """The engine as a target group in this process."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine

    async def info(self) -> TargetInfo:
        return self.engine.info()

    async def step(self, plan: StepPlan) -> StepReport:
        return self.engine.step(plan)


def engine(slept: list[float]) -> SimulatedEngine:
    return SimulatedEngine(INFO, COSTS, clock=lambda: 0.0, sleep=slept.append)


def asking(name: str, depth: int, max_tokens: int = 1000) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, max_depth=depth)
    return Request(request_id=name, prompt_ids=(3, 1, 4), params=params, eos_token_ids=(200,))


def test_costs_are_those_declared() -> None:
    verify = (Verify(ref=REF, depth=3), Verify(ref=REF, depth=1))
    costs = COSTS.of(StepPlan(step_id=1, verify=verify, prefill=(Prefill(ref=REF, start=0, stop=10, last=True),)))
    assert (costs.forward, costs.draft_wait, costs.num_rows) == (25.0 + 16 * 0.5, 6.0, 16)
    assert COSTS.of(StepPlan(step_id=1)).forward == 0.0


async def test_the_text_is_known_whatever_was_drafted_and_acceptance_is_as_declared() -> None:
    slept: list[float] = []
    driver = RoundDriver(Awaited(engine(slept)), MemoryFrontierStore(), SchedulerConfig(), lambda _: fake_piece)
    await driver.start()
    while not driver.status().target_ready:
        await driver._target.ready.wait()
    texts = {}
    for depth in (0, 2):
        rows = [row async for row in await driver.submit(asking(f"r{depth}", depth))]
        texts[depth] = [token for row in rows for token in row.tokens]
    await driver.close()
    assert texts[0] == texts[2] == simulated_text(asking("r0", 0), 0, 1000, INFO.vocab_size)
    assert 200 not in texts[0]
    first, second = driver.ledger.acceptance()
    assert first == pytest.approx(0.9, abs=0.05)
    assert second == pytest.approx(0.45, abs=0.08)
    assert min(one for one in slept if one) == pytest.approx(0.0255)


def test_its_name_says_what_it_is() -> None:
    settings = Settings(simulated=SimulatedSettings())
    info = simulated_engine(settings, "target-1").info()
    assert (info.model, info.numerics) == ("simulated", "simulated")
    assert not settings.wants_proposer_process
    assert Settings().simulated is None
    with pytest.raises(InvalidField, match="one process"):
        simulated_engine(settings.model_copy(update={"engine": EngineSettings(target_ranks=2)}), "target-1")
