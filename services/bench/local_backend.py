"""The whole system in this process, for a bench: engines, driver and a store in memory.

One thread computes. Drafts are computed when the target asks for them, not when it feeds their rows: so their whole
cost is the target's wait, `draft_wait`, and the ledger's C_mtp hides nothing (over the network part of it overlaps the
commit).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.config import EngineConfig, SchedulerConfig
from seqmtp_serve.engine.direct import DirectProposer
from seqmtp_serve.engine.proposer import ProposerEngine
from seqmtp_serve.engine.target import TargetEngine
from seqmtp_serve.errors import MtpIncomplete
from seqmtp_serve.frontier.memory_store import MemoryFrontierStore
from seqmtp_serve.ports import Draft, FeedRows, StepPlan, StepReport, TargetInfo
from seqmtp_serve.request import Ref
from seqmtp_serve.rounds import RoundDriver
from services.bench.driver_backend import DriverBackend
from services.detokenizer import Detokenizer
from services.gateway.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSystem:
    """What to build. `speculates` False leaves the MTP part alone."""

    model: str
    mtp: str | None
    speculates: bool
    engine: EngineConfig
    max_batch: int


class DeferredProposer(DirectProposer):
    """Feeds wait in order until drafts are collected; they are computed then, in the caller's thread."""

    def __init__(self, engine: ProposerEngine) -> None:
        super().__init__(engine)
        self._waiting: list[tuple[Sequence[FeedRows], Sequence[str]]] = []

    def feed(self, feeds: Sequence[FeedRows], closed: Sequence[str] = ()) -> None:
        self._waiting.append((feeds, closed))

    def collect(self, refs: Sequence[Ref], timeout_s: float) -> dict[str, Draft]:
        waiting, self._waiting = self._waiting, []
        for feeds, closed in waiting:
            super().feed(feeds, closed)
        return super().collect(refs, timeout_s)


class ThreadTarget:
    """Implements `ports.TargetGroup`: steps of an engine on one thread of its own."""

    def __init__(self, engine: TargetEngine, pool: ThreadPoolExecutor) -> None:
        self._engine, self._pool = engine, pool

    async def info(self) -> TargetInfo:
        return self._engine.info()

    async def step(self, plan: StepPlan) -> StepReport:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._engine.step, plan)


@asynccontextmanager
async def open_local(system: LocalSystem) -> AsyncIterator[DriverBackend]:
    """Load both parts and start the driver. Raises ModelNotFound, TargetIncomplete or MtpIncomplete."""
    checkpoint = open_checkpoint(system.model, system.mtp)
    scheduler = SchedulerConfig(max_batch=system.max_batch, max_depth=system.engine.max_depth)
    tokenizer = checkpoint.tokenizer()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="target") as pool:
        engine = await asyncio.get_running_loop().run_in_executor(pool, _build, system, checkpoint)
        driver = RoundDriver(
            ThreadTarget(engine, pool),
            MemoryFrontierStore(),
            scheduler,
            lambda request: Detokenizer(tokenizer, request.prompt_ids),
        )
        await driver.start()
        while not driver.status().target_ready:
            await asyncio.sleep(0.01)
        template = ChatTemplate(checkpoint.chat_template)

        def encode(prompt: str) -> list[int]:
            text = template.render([{"role": "user", "content": prompt}])
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
            return ids

        yield DriverBackend(
            driver,
            model=checkpoint.name,
            numerics=system.engine.numerics,
            encode=encode,
            decode=tokenizer.decode,
            eos_token_ids=checkpoint.eos_token_ids,
        )
        await driver.close()


def _build(system: LocalSystem, checkpoint: Checkpoint) -> TargetEngine:
    proposer = None
    if system.speculates:
        tensors = checkpoint.mtp_tensors()
        if checkpoint.mtp_config is None:
            raise MtpIncomplete(f"{checkpoint.name}: has no MTP part")
        proposer = DeferredProposer(ProposerEngine(system.engine, checkpoint.config, checkpoint.mtp_config, tensors))
    return TargetEngine(
        system.engine,
        checkpoint.config,
        checkpoint.target_tensors(),
        proposer,
        name=checkpoint.name,
        fingerprint=checkpoint.manifest.fingerprint,
    )
