"""A scripted service for a real browser: a gateway over committed rows as they could be, with workers that come and go.

`python -m tests.browser.scripted --port 8123` serves it, for working on the page without a model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import replace

import uvicorn

from seqmtp_serve.frontier.finish import FinishChecker
from seqmtp_serve.frontier.ledger import Ledger
from seqmtp_serve.ports import RowResult
from seqmtp_serve.request import CommittedRow, Ref, Request
from services.detokenizer import Detokenizer
from services.gateway.coordinators import CoordinatorStatus, Worker
from services.gateway.fake import STATUS, FakeCoordinator
from tests.services.gateway.world import EOS_ID, TOKENIZER, app_over, ids

TEXT = (
    "A paper clip does more than hold paper. Bent straight, it presses the hidden reset button of a router; "
    "twisted into a loop, it mends a broken zip or hangs a small picture; warmed and curled, it cuts clean lines "
    "in soft wax. The oldest design that is still sold is the Gem, which was never patented."
)
ACCEPTED = (3, 1, 2, 0, 3, 2, 3, 1, 0, 2, 3, 3)  # of three drafts, round by round
MODEL = "scripted"
WORKERS = ("target-7c1fe09ab2", "proposer-3fa2d418c6", "proposer-b70144e5aa", "coordinator-fake-0")


class ScriptedService(FakeCoordinator):
    """Says `TEXT` to everybody, in rounds of `ACCEPTED` as far as the request's depth and the proposers let it."""

    def __init__(self, *, delay_s: float = 0.0, text: str = TEXT, accepted: Sequence[int] = ACCEPTED) -> None:
        super().__init__(TOKENIZER, [], delay_s=delay_s)
        self.accepted = accepted
        self.tokens = [*ids(text), EOS_ID]
        self.account = Ledger(STATUS.max_depth)
        self.listed = [Worker(kind=name.split("-")[0], id=name) for name in WORKERS]
        self._made: dict[str, int] = {}  # tokens of each request that a resumed reader need not wait for

    @property
    def drafts_come(self) -> bool:
        return any(worker.kind == "proposer" for worker in self.listed)

    @property
    def num_rounds(self) -> int:
        """Of all requests so far."""
        return int(self.account.counters().get("rounds", 0))

    def kill(self, id: str) -> None:
        """The worker's lease has lapsed."""
        self.listed = [worker for worker in self.listed if worker.id != id]

    async def status(self) -> Sequence[CoordinatorStatus]:
        detail = "" if self.drafts_come else "no proposer is registered"
        status = replace(STATUS, coordinator_id=WORKERS[-1], model=MODEL, running=self.open_streams)
        return [replace(status, mtp_ready=self.drafts_come, mtp_detail=detail, counters=self.account.counters())]

    async def generate(self, request: Request, meta: Mapping[str, str]) -> AsyncGenerator[CommittedRow, None]:
        """Rows as they are made, each taking `delay_s`; what was made before comes at once."""
        self._started.setdefault(request.request_id, (request, dict(meta)))
        self.requests.append(request)
        self.open_streams += 1
        num_tokens = 0
        try:
            for row in self._rows(request):
                num_tokens += len(row.tokens)
                if num_tokens > self._made.get(request.request_id, 0):
                    await asyncio.sleep(self.delay_s)
                    self._made[request.request_id] = num_tokens
                    self._count(row)
                yield row
        finally:
            self.open_streams -= 1

    def _rows(self, request: Request) -> Iterator[CommittedRow]:
        """Cut through the real finish check; each row is cut when it is asked for, by who is there then."""
        checker, detokenize = FinishChecker(request), Detokenizer(self.tokenizer, request.prompt_ids)
        place = 0
        for version in itertools.count(1):
            drafted = request.params.max_depth if self.drafts_come and version > 1 else 0
            accepted = min(self.accepted[version % len(self.accepted)], drafted)
            kept: list[int] = []
            for token in self.tokens[place : place + accepted + 1]:
                kept.append(token)
                if checker.push(token, detokenize(token)) is not None:
                    break
            place += len(kept)
            last = "n" if accepted == drafted else "c"
            yield CommittedRow(
                request_id=request.request_id,
                version=version,
                tokens=tuple(kept),
                drafted=drafted,
                accepted=min(accepted, len(kept)),
                origins=("b" if version == 1 else "a" * accepted + last)[: len(kept)],
                finish=checker.finish.reason if checker.finish else None,
                stop_reason=checker.finish.stop_reason if checker.finish else None,
                timings_ms=_timings(version, drafted),
            )
            if checker.finish is not None:
                return

    def _count(self, row: CommittedRow) -> None:
        ref = Ref(request_id=row.request_id, epoch=1, version=row.version - 1, digest=bytes(16))
        self.account.record_row(row, RowResult(ref=ref, tokens=row.tokens, drafted=row.drafted, accepted=row.accepted))


def _timings(version: int, drafted: int) -> dict[str, float]:
    """Milliseconds that vary a little from round to round."""
    wave = (version * 7) % 5
    parts = {"forward": 38.0 + 4 * wave + 5 * drafted, "draft_wait": 2.0 * drafted + wave, "select": 1.5, "pack": 2.0}
    return parts | {"step": sum(parts.values()) + 3 + wave % 3}


def main() -> None:
    """Serve until Ctrl-C; a proposer goes and another comes every twenty seconds with `--restless`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--delay", type=float, default=0.06, help="seconds a round takes")
    parser.add_argument("--restless", action="store_true", help="workers leave and come back")
    args = parser.parse_args()
    service = ScriptedService(delay_s=args.delay)

    async def serve() -> None:
        server = uvicorn.Server(uvicorn.Config(app_over(service), port=args.port, log_level="warning"))
        serving = asyncio.create_task(server.serve())
        for number in itertools.count() if args.restless else ():
            await asyncio.sleep(6)
            service.kill(next(worker.id for worker in service.listed if worker.kind == "proposer"))
            await asyncio.sleep(6)
            service.listed.append(Worker(kind="proposer", id=f"proposer-{number:06x}"))
        await serving

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())


if __name__ == "__main__":
    main()
