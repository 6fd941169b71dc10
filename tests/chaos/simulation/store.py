"""The frontier store of a simulation: the product's own store in memory, its log, and a client that may not hear it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from seqmtp_serve.errors import StoreUnreachable
from seqmtp_serve.frontier.memory_store import MemoryFrontierStore
from seqmtp_serve.ports import Commit, CommitResult, Snapshot
from seqmtp_serve.request import Request
from tests.chaos.history import Claimed, Committed, StoreEvent
from tests.chaos.simulation.network import Network, Process

ATTEMPT_S = 0.05  # a call that is not answered by then is made again

Answer = TypeVar("Answer")


class LoggedStore(MemoryFrontierStore):
    """`log` is the order in which claims and rows entered the records, and who sent them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock=clock)
        self.log: list[StoreEvent] = []

    def acquire_now(self, request: Request, owner: str, **how: Any) -> Snapshot:
        """`acquire`, at once."""
        known = self._find(request.request_id)
        before = 0 if known is None else known.epoch
        snapshot = self._run(self.acquire(request, owner, 1.0, **how))
        if snapshot.epoch > before:
            self.log.append(Claimed(request_id=request.request_id, epoch=snapshot.epoch, owner=owner))
        return snapshot

    def commit_now(self, commit: Commit, owner: str) -> CommitResult:
        """One row of `commit`, at once. What counts for the log is whether the record grew."""
        record = self._find(commit.row.request_id)
        before = 0 if record is None else len(record.rows)
        answer = self._commit_one(commit)
        if record is not None and len(record.rows) > before:
            self.log.append(
                Committed(
                    request_id=commit.row.request_id,
                    epoch=commit.epoch,
                    version=commit.row.version,
                    tokens=commit.row.tokens,
                    owner=owner,
                )
            )
        return answer

    def snapshot_now(self, request_id: str, after_version: int) -> Snapshot | None:
        """`snapshot`, at once."""
        return self._run(self.snapshot(request_id, after_version))

    def cancel_now(self, request_id: str, **how: Any) -> CommitResult:
        """`cancel`, at once."""
        return self._run(self.cancel(request_id, **how))

    @staticmethod
    def _run(answering) -> Answer:
        """The memory store answers without waiting: its coroutines end at their first step."""
        try:
            answering.send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError("the memory store waited")


class StoreClient:
    """Implements ports.FrontierStore for one coordinator: calls and replies get lost, and arrive after their death."""

    def __init__(self, network: Network, me: Process, server: Callable[[], Process], store: LoggedStore) -> None:
        self._network, self._me, self._server, self._store = network, me, server, store

    async def acquire(self, request: Request, owner: str, lease_s: float, **how: Any) -> Snapshot:
        return await self._call(lambda: self._store.acquire_now(request, owner, **how))

    async def commit(self, commits: Sequence[Commit]) -> Sequence[CommitResult]:
        """A pipeline: when it breaks, some of its rows may be in and some not."""
        rng = self._network.rng
        whole = rng.random() >= self._network.loss
        arriving = list(commits) if whole else list(commits)[: rng.randrange(len(commits) + 1)]
        owner = self._me.name
        answers = await self._call(lambda: [self._store.commit_now(commit, owner) for commit in arriving])
        if len(answers) < len(commits):
            raise StoreUnreachable("the connection broke inside a pipeline")
        return answers

    async def cancel(self, request_id: str, **how: Any) -> CommitResult:
        return await self._call(lambda: self._store.cancel_now(request_id, **how))

    async def snapshot(self, request_id: str, after_version: int = 0) -> Snapshot | None:
        return await self._call(lambda: self._store.snapshot_now(request_id, after_version))

    async def _call(self, work: Callable[[], Answer]) -> Answer:
        try:
            return await self._network.call(self._me, self._server(), work, timeout_s=ATTEMPT_S)
        except TimeoutError:
            raise StoreUnreachable("no answer in time") from None
