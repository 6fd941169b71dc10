"""The whole system in one process: every port, no network. The test bed, the bench, and the shortest way to read it.

    RoundDriver ─ThreadTarget▶ TargetEngine ─DeferredProposer▶ ProposerEngine,      rows ▶ MemoryFrontierStore

One thread computes, so nothing overlaps: drafts are computed when the target asks for them, and their whole cost is
its `draft_wait`. Over the network part of it hides behind the commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from tokenizers import Tokenizer

from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.config import EngineConfig, SchedulerConfig
from seqmtp_serve.engine.direct import DirectProposer
from seqmtp_serve.engine.proposer import ProposerEngine
from seqmtp_serve.engine.target import TargetEngine
from seqmtp_serve.errors import MtpIncomplete
from seqmtp_serve.frontier.memory_store import MemoryFrontierStore
from seqmtp_serve.live_requests import Decoder
from seqmtp_serve.model.deepseek import ExpertShare
from seqmtp_serve.model.huge_pages import use_huge_pages
from seqmtp_serve.ports import Draft, FeedRows, FrontierStore, Proposer, StepPlan, StepReport, TargetInfo
from seqmtp_serve.request import CommittedRow, Ref, Request
from seqmtp_serve.rounds import RoundDriver
from seqmtp_serve.speculation.grammar import GrammarCompiler


class DeferredProposer(DirectProposer):
    """Feeds wait, in order, until drafts of their sequence are collected; they are computed then, in one pass.

    So rounds without drafts cost no drafting, and a sequence's first one with drafts pays for its rows, not for chains
    that nobody wants any more.
    """

    def __init__(self, engine: ProposerEngine) -> None:
        super().__init__(engine)
        self._waiting: list[FeedRows] = []
        self._closed: list[str] = []

    def feed(self, feeds: Sequence[FeedRows], closed: Sequence[str] = ()) -> None:
        """Put the rows aside, and forget those of requests that ended."""
        self._waiting = [feed for feed in self._waiting if feed.ref.request_id not in closed]
        self._waiting += feeds
        self._closed += closed

    def collect(self, refs: Sequence[Ref], timeout_s: float) -> dict[str, Draft]:
        """Compute what waits of these sequences, then answer."""
        wanted = {ref.request_id for ref in refs}
        feeds = [feed for feed in self._waiting if feed.ref.request_id in wanted]
        self._waiting = [feed for feed in self._waiting if feed.ref.request_id not in wanted]
        closed, self._closed = tuple(self._closed), []
        if feeds or closed:
            super().feed(feeds, closed)
        return super().collect(refs, timeout_s)


class ThreadTarget:
    """Implements `ports.TargetGroup`: the steps of an engine on one thread of its own, in the order sent."""

    def __init__(self, engine: TargetEngine) -> None:
        self.engine = engine
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="target")

    async def info(self) -> TargetInfo:
        """What the engine can do."""
        return self.engine.info()

    async def step(self, plan: StepPlan) -> StepReport:
        """Run the plan on the engine's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.engine.step, plan)

    def close(self) -> None:
        """Wait for the step that runs, and end the thread."""
        self._thread.shutdown()


class LocalService:
    """A round driver on an engine in this process. Use it from one event loop, inside `running`."""

    def __init__(self, driver: RoundDriver, engine: TargetEngine) -> None:
        self.driver = driver
        self.engine = engine

    @classmethod
    @asynccontextmanager
    async def running(
        cls,
        engine: TargetEngine,
        decoder_factory: Callable[[Request], Decoder],
        *,
        scheduler: SchedulerConfig | None = None,
        store: FrontierStore | None = None,
    ) -> AsyncIterator[LocalService]:
        """Serve on `engine` until the block ends, which also checks the engine's invariants when nothing ran on."""
        target = ThreadTarget(engine)
        config = scheduler or SchedulerConfig()
        driver = RoundDriver(target, store or MemoryFrontierStore(), config, decoder_factory)
        try:
            await driver.start()
            yield cls(driver, engine)
        finally:
            await driver.close()
            target.close()
        engine.check()

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        model: str,
        mtp: str | None = None,
        *,
        decoder: Callable[[Tokenizer, Sequence[int]], Decoder],
        engine: EngineConfig | None = None,
        scheduler: SchedulerConfig | None = None,
    ) -> AsyncIterator[LocalService]:
        """Load a checkpoint and serve it. A broken or missing MTP part leaves ordinary decoding (depth 0).

        `decoder` makes the decoder of one output from the tokenizer and the prompt. Raises ModelNotFound or
        TargetIncomplete.
        """
        checkpoint = open_checkpoint(model, mtp)
        tokenizer = checkpoint.tokenizer()
        built = await asyncio.to_thread(build_target, checkpoint, engine or EngineConfig())
        async with cls.running(built, lambda one: decoder(tokenizer, one.prompt_ids), scheduler=scheduler) as service:
            yield service

    async def generate(self, request: Request) -> list[CommittedRow]:
        """All rows of one request, from the first to its end."""
        while not self.driver.status().target_ready:
            await asyncio.sleep(0)
        return [row async for row in await self.driver.submit(request)]


def build_target(checkpoint: Checkpoint, config: EngineConfig) -> TargetEngine:
    """The target engine of a checkpoint, with its proposer in the same thread when the MTP gate passes."""
    return build_engines(checkpoint, config)[0]


def build_engines(
    checkpoint: Checkpoint, config: EngineConfig, share: ExpertShare | None = None
) -> tuple[TargetEngine, DeferredProposer | None]:
    """The same, and the proposer (None: every round runs at depth 0). `share`: this rank's experts in the target."""
    proposer = None
    try:
        tensors = checkpoint.mtp_tensors()
        if checkpoint.mtp_config is not None:
            proposer = DeferredProposer(ProposerEngine(config, checkpoint.config, checkpoint.mtp_config, tensors))
    except MtpIncomplete:
        pass  # the target gate is judged apart: see `seqmtp inspect`
    return target_engine(checkpoint, config, proposer, share), proposer


def target_engine(
    checkpoint: Checkpoint, config: EngineConfig, proposer: Proposer | None, share: ExpertShare | None = None
) -> TargetEngine:
    """The target engine of a checkpoint that feeds `proposer`."""
    target = TargetEngine(
        config,
        checkpoint.config,
        checkpoint.target_tensors(None if share is None else share.experts),
        proposer,
        name=checkpoint.name,
        fingerprint=checkpoint.manifest.fingerprint,
        share=share,
        grammars=GrammarCompiler(checkpoint.tokenizer, checkpoint.config.vocab_size),
    )
    use_huge_pages()
    return target
