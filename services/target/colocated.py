"""The MTP module in the target's own process: ports.Proposer without a network, for small installations and comparison.

It drafts on a thread of its own, so that part of it hides behind the commit as it does over the network; what it takes
from the target's cores nothing can hide. One process fewer, and one failure domain fewer: if it breaks, drafts do not
come and the target goes on at depth 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.engine.proposer import ProposerEngine, Refusal
from seqmtp_serve.errors import MtpIncomplete
from seqmtp_serve.ports import Draft, FeedRows, Proposer
from seqmtp_serve.request import Ref
from services.core_config import proposer_config
from services.proposer.worker import DraftEngine
from services.rpc.discovery import Discover
from services.settings import Settings
from services.target.draft_box import DraftBox
from services.target.fit import judge
from services.target.proposer_link import GrpcProposer

log = logging.getLogger(__name__)


class Link(Proposer, Protocol):
    """A proposer as a target holds it: `detail` says why there are no drafts, `run` keeps it until cancelled."""

    @property
    def detail(self) -> str: ...

    async def run(self) -> None: ...


class ColocatedProposer:
    """Implements `Link` over an engine. With `engine` None it never has a draft, and `detail` says why."""

    def __init__(self, engine: DraftEngine | None, detail: str = "") -> None:
        self._engine, self._detail = engine, detail
        self._box = DraftBox()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="proposer-engine")
        self._lock = threading.Lock()
        self._open: set[str] = set()  # sequences that were opened, with no gap since

    @property
    def ready(self) -> bool:
        """Whether there is a module that works."""
        return self._engine is not None

    @property
    def generation(self) -> int:
        """It is never replaced."""
        return 1

    @property
    def detail(self) -> str:
        """In a sentence, why there are no drafts; empty when there should be."""
        return self._detail

    def feed(self, feeds: Sequence[FeedRows], closed: Sequence[str] = ()) -> None:
        """See ports.Proposer."""
        self._box.forget(closed)
        with self._lock:
            self._open.difference_update(closed)
            self._open.update(rows.ref.request_id for rows in feeds if rows.reset)
            sent = [rows for rows in feeds if rows.ref.request_id in self._open]
        if self._engine is not None and (sent or closed):
            self._box.expect(rows.ref for rows in sent if rows.depth > 0)
            with contextlib.suppress(RuntimeError):  # shut down: the process is ending
                self._thread.submit(self._propose, sent, tuple(closed))

    def collect(self, refs: Sequence[Ref], timeout_s: float) -> dict[str, Draft]:
        """See ports.Proposer."""
        return self._box.collect(refs, timeout_s)

    async def run(self) -> None:
        """Until cancelled: there is nothing to keep."""
        try:
            await asyncio.Event().wait()
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Draft nothing more; waits for the pass that runs."""
        self._thread.shutdown(wait=True)

    def _propose(self, feeds: Sequence[FeedRows], closed: Sequence[str]) -> None:
        if self._engine is None:
            return
        try:
            answers = self._engine.propose(feeds, closed)
        except Exception as error:  # its state is no longer known; the target needs it for nothing but speed
            log.exception("the proposer in this process broke: every round runs at depth 0")
            self._engine, self._detail = None, f"the proposer in this process broke: {error}"
            self._box.clear()
            return
        self._box.put(answer for answer in answers if isinstance(answer, Draft))
        for answer in answers:
            if isinstance(answer, Refusal):  # the sequence has a gap now: it decodes without drafts
                with self._lock:
                    self._open.discard(answer.ref.request_id)
                self._box.refuse(answer.ref)
                log.warning("feed of %s refused: %s (%s)", answer.ref.request_id, answer.message, answer.code)


async def open_link(settings: Settings, checkpoint: Checkpoint, discover: Discover) -> Link:
    """The proposer that the settings name: one in this process, or whichever the registry knows."""
    if settings.speculation.proposer == "colocated":
        return await asyncio.to_thread(colocated, settings, checkpoint)
    return GrpcProposer(discover, judge(checkpoint))


def colocated(settings: Settings, checkpoint: Checkpoint) -> ColocatedProposer:
    """Load the module; one that is missing or broken leaves the target at depth 0, as it does elsewhere."""
    if not settings.speculation.num_speculative_tokens:
        return ColocatedProposer(None, "speculation is off")
    try:
        tensors = checkpoint.mtp_tensors()
    except MtpIncomplete as error:
        log.warning("no drafts: %s", error)
        return ColocatedProposer(None, str(error))
    assert checkpoint.mtp_config is not None, "the MTP gate passed"
    return ColocatedProposer(
        ProposerEngine(proposer_config(settings), checkpoint.config, checkpoint.mtp_config, tensors)
    )
