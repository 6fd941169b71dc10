"""A coordinator in a few lines: it commits scripted rows. For tests, and for working on the gateway without a model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import replace

from tokenizers import Tokenizer

from seqmtp_serve.errors import RequestNotFound, SeqMTPError
from seqmtp_serve.fake import fake_logprobs
from seqmtp_serve.frontier.ancestry import extend_digest, initial_digest
from seqmtp_serve.frontier.finish import FinishChecker
from seqmtp_serve.frontier.round_notes import RequestLedger, RoundNote
from seqmtp_serve.frontier.sequence import end_row
from seqmtp_serve.ports import Snapshot
from seqmtp_serve.request import CommittedRow, FinishReason, Request
from services.detokenizer import Detokenizer
from services.gateway.coordinators import CoordinatorStatus, Worker

STATUS = CoordinatorStatus(coordinator_id="fake-0", model="fake", max_model_len=2048, max_depth=3)


class FakeCoordinator:
    """Replays `script` (the tokens of each round) through the real finish check, so rows are cut as in production.

    `error` is raised before row `error_at` (1: instead of the first). `delay_s` passes before each row. `cached` prompt
    tokens are said to be found, and drafts (`predicted`) to come from a request's prediction. `open_streams` counts
    readers, `requests` records what was asked.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        script: Sequence[Sequence[int]],
        *,
        status: Sequence[CoordinatorStatus] = (STATUS,),
        error: SeqMTPError | None = None,
        error_at: int = 1,
        delay_s: float = 0.0,
        cached: int = 0,
        predicted: bool = False,
    ) -> None:
        self.tokenizer, self.script, self.statuses = tokenizer, script, list(status)
        self.listed: list[Worker] = []
        self.notes: list[RoundNote] = []
        self.error, self.error_at, self.delay_s = error, error_at, delay_s
        self.cached = cached
        self.predicted = predicted
        self.requests: list[Request] = []
        self.meta: list[Mapping[str, str]] = []
        self.open_streams = 0
        self.committed: int | None = None
        self.cancelled: set[str] = set()
        self._started: dict[str, tuple[Request, Mapping[str, str]]] = {}

    async def generate(self, request: Request, meta: Mapping[str, str]) -> AsyncGenerator[CommittedRow, None]:
        """Rows of the script; after its end the last one is repeated until the budget is spent."""
        self.requests.append(request)
        self.meta.append(meta)
        self.open_streams += 1
        try:
            self._started.setdefault(request.request_id, (request, dict(meta)))
            for row in self._committed(request):
                if self.error is not None and row.version == self.error_at:
                    raise self.error
                await asyncio.sleep(self.delay_s)
                yield row
        finally:
            self.open_streams -= 1

    def _committed(self, request: Request) -> Iterator[CommittedRow]:
        """The rows, each with its place in a record of epoch 1."""
        digest = initial_digest(request.prompt_ids)
        for row in self._rows(request):
            digest = extend_digest(digest, row.tokens)
            yield replace(row, epoch=1, digest=digest)

    def _rows(self, request: Request) -> Iterator[CommittedRow]:
        checker = FinishChecker(request)
        detokenize = Detokenizer(self.tokenizer, request.prompt_ids)
        version = 0
        while checker.finish is None:
            round_ = self.script[min(version, len(self.script) - 1)]
            version += 1
            kept: list[int] = []
            for token in round_:
                kept.append(token)
                if checker.push(token, detokenize(token)) is not None:
                    break
            accepted = 0 if version == 1 else len(round_) - 1
            last = "cn"[accepted == request.params.max_depth]
            yield CommittedRow(
                request_id=request.request_id,
                version=version,
                tokens=tuple(kept),
                drafted=0 if version == 1 else request.params.max_depth,
                accepted=accepted,
                origins=("b" * len(round_) if version == 1 else "a" * accepted + last)[: len(kept)],
                finish=checker.finish.reason if checker.finish else None,
                stop_reason=checker.finish.stop_reason if checker.finish else None,
                cached=self.cached if version == 1 else 0,
                predicted=self.predicted and version > 1 and bool(request.prediction_ids),
                logprobs=fake_logprobs(kept, request.params.logprobs),
                prompt_logprobs=()
                if version > 1
                else fake_logprobs(request.prompt_ids[1:], request.params.prompt_logprobs),
            )

    async def start(self, request: Request, meta: Mapping[str, str]) -> Snapshot:
        """Remember the request under its id; the first one counts."""
        if self.error is not None and self.error_at == 1:
            raise self.error
        self._started.setdefault(request.request_id, (request, dict(meta)))
        return await self.lookup(request.request_id)

    async def attach(self, request: Request) -> AsyncGenerator[CommittedRow, None]:
        """The rows of a request that was started, or generated, before."""
        record = await self.lookup(request.request_id)
        at = replace(record.ref, version=0, digest=initial_digest(request.prompt_ids))
        async with contextlib.aclosing(self.generate(record.request, record.meta)) as rows:
            async for row in rows:
                if request.request_id in self.cancelled:
                    yield end_row(at, FinishReason.CANCELLED)
                    return
                yield row
                at = row.ref

    async def lookup(self, request_id: str) -> Snapshot:
        """The record, as if `committed` rows were in it (None: all)."""
        if request_id not in self._started:
            raise RequestNotFound(f"{request_id} is unknown")
        request, meta = self._started[request_id]
        rows = tuple(self._committed(request))[: self.committed]
        finish = rows[-1].finish if rows else None
        if request_id in self.cancelled:
            finish = FinishReason.CANCELLED
        digest = rows[-1].digest if rows else initial_digest(request.prompt_ids)
        return Snapshot(request=request, epoch=1, version=len(rows), digest=digest, rows=rows, finish=finish, meta=meta)

    async def ledger(self, request_id: str) -> RequestLedger:
        """The record, with the notes it was given in `notes`."""
        record = await self.lookup(request_id)
        return RequestLedger(record=record, notes=tuple(note for note in self.notes if note.version <= record.version))

    async def cancel(self, request_id: str) -> bool:
        """Its readers get no further row."""
        self.cancelled.add(request_id)
        return request_id in self._started

    async def status(self) -> Sequence[CoordinatorStatus]:
        """The statuses it was given."""
        return self.statuses

    async def workers(self) -> Sequence[Worker]:
        """Those of `listed`."""
        return self.listed

    async def close(self) -> None:
        """Nothing is held."""
