"""A gateway over real engines of a small made-up model, all in one process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import replace

import httpx

from seqmtp_serve.config import SchedulerConfig
from seqmtp_serve.engine.proposer import ProposerEngine
from seqmtp_serve.engine.target import TargetEngine
from seqmtp_serve.local import DeferredProposer, LocalService
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.ports import Snapshot
from seqmtp_serve.request import CommittedRow, Request
from seqmtp_serve.speculation.grammar import GrammarCompiler
from services.detokenizer import Detokenizer
from services.gateway.fake import FakeCoordinator
from services.gateway.text_model import TextModel
from tests.services.gateway.world import TEXT, TOKENIZER, http
from tests.unit.engine.engines import config
from tests.unit.engine.test_structured_text import MODEL, MTP, TARGET

SCHEDULER = SchedulerConfig(max_batch=8, step_tokens=64, prefill_chunk=24)


class LocalCoordinator(FakeCoordinator):
    """A coordinator whose rows come from real engines here; a record that is read again is computed again."""

    def __init__(self, service: LocalService) -> None:
        super().__init__(TOKENIZER, [])
        self.service = service
        self.accepted = 0

    async def generate(self, request: Request, meta: Mapping[str, str]) -> AsyncGenerator[CommittedRow, None]:
        self._started.setdefault(request.request_id, (request, dict(meta)))
        async for row in await self.service.driver.submit(request):
            self.accepted += row.accepted
            yield row

    async def lookup(self, request_id: str) -> Snapshot:
        """The record as it is before its first row."""
        request, meta = self._started[request_id]
        return Snapshot(request=request, epoch=1, version=0, digest=bytes(16), rows=(), finish=None, meta=meta)


@contextlib.asynccontextmanager
async def served(
    text: TextModel = TEXT, *, max_model_len: int = 256
) -> AsyncIterator[tuple[httpx.AsyncClient, LocalCoordinator]]:
    """A client of the gateway, and its coordinator. The tokenizer may be `TOKENIZER` with three more tokens at most."""
    settings = config(max_model_len=max_model_len, num_pages=400)
    model = replace(MODEL, max_position=max_model_len)
    link = DeferredProposer(ProposerEngine(settings, model, MtpConfig(), MTP))
    compiler = GrammarCompiler(lambda: text.tokenizer, MODEL.vocab_size)
    engine = TargetEngine(settings, model, TARGET, link, grammars=compiler)
    async with LocalService.running(
        engine, lambda one: Detokenizer(text.tokenizer, one.prompt_ids), scheduler=SCHEDULER
    ) as it:
        while not it.driver.status().target_ready:
            await asyncio.sleep(0)
        coordinator = LocalCoordinator(it)
        async with http(coordinator, text=text) as client:
            yield client, coordinator
