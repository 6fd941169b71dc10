"""A coordinator in a few lines: it commits scripted rows. For tests, and for working on the gateway without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence

from tokenizers import Tokenizer

from seqmtp_serve.errors import SeqMTPError
from seqmtp_serve.frontier.finish import FinishChecker
from seqmtp_serve.request import CommittedRow, Request
from services.detokenizer import Detokenizer
from services.gateway.coordinators import CoordinatorStatus

STATUS = CoordinatorStatus(coordinator_id="fake-0", model="fake", max_model_len=2048, max_depth=3)


class FakeCoordinator:
    """Replays `script` (the tokens of each round) through the real finish check, so rows are cut as in production.

    `error` is raised before row `error_at` (1: instead of the first). `delay_s` passes before each row. `open_streams`
    counts readers, `requests` records what was asked.
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
    ) -> None:
        self.tokenizer, self.script, self.statuses = tokenizer, script, list(status)
        self.error, self.error_at, self.delay_s = error, error_at, delay_s
        self.requests: list[Request] = []
        self.meta: list[Mapping[str, str]] = []
        self.open_streams = 0

    async def generate(self, request: Request, meta: Mapping[str, str]) -> AsyncGenerator[CommittedRow, None]:
        """Rows of the script; after its end the last one is repeated until the budget is spent."""
        self.requests.append(request)
        self.meta.append(meta)
        self.open_streams += 1
        try:
            checker = FinishChecker(request)
            detokenize = Detokenizer(self.tokenizer, request.prompt_ids)
            version = 0
            while checker.finish is None:
                round_ = self.script[min(version, len(self.script) - 1)]
                version += 1
                if self.error is not None and version == self.error_at:
                    raise self.error
                await asyncio.sleep(self.delay_s)
                kept: list[int] = []
                for token in round_:
                    kept.append(token)
                    if checker.push(token, detokenize(token)) is not None:
                        break
                accepted = 0 if version == 1 else len(round_) - 1
                yield CommittedRow(
                    request_id=request.request_id,
                    version=version,
                    tokens=tuple(kept),
                    drafted=0 if version == 1 else request.params.max_depth,
                    accepted=accepted,
                    origins=(
                        "b" * len(round_)
                        if version == 1
                        else "a" * accepted + "cn"[accepted == request.params.max_depth]
                    )[: len(kept)],
                    finish=checker.finish.reason if checker.finish else None,
                    stop_reason=checker.finish.stop_reason if checker.finish else None,
                )
        finally:
            self.open_streams -= 1

    async def status(self) -> Sequence[CoordinatorStatus]:
        """The statuses it was given."""
        return self.statuses

    async def close(self) -> None:
        """Nothing is held."""
