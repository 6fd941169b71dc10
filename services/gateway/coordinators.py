"""The gateway's one seam: coordinators, seen as a stream of committed rows and a list of statuses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from seqmtp_serve.frontier.round_notes import RequestLedger
from seqmtp_serve.ports import Snapshot
from seqmtp_serve.request import CommittedRow, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorStatus:
    """What one coordinator says of itself and of the workers behind it. `max_model_len` 0: no target was ever seen."""

    coordinator_id: str
    model: str
    max_model_len: int
    max_depth: int
    numerics: str = "invariant"
    target_ready: bool = True
    target_detail: str = ""
    mtp_ready: bool = True
    mtp_detail: str = ""
    store_ready: bool = True
    store_detail: str = ""
    running: int = 0
    waiting: int = 0
    max_waiting: int = 0
    counters: Mapping[str, float] = field(default_factory=dict)
    draining: bool = False
    gauges: Mapping[str, float] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """Whether it can take a request now. The MTP side is not asked: without it generation goes on at depth 0."""
        return self.target_ready and self.store_ready and not self.draining


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One process with a live entry in the registry: `kind` is target, proposer or coordinator."""

    kind: str
    id: str


class CoordinatorClient(Protocol):
    """Every coordinator there is, as one. Safe to share between tasks of one event loop."""

    def generate(self, request: Request, meta: Mapping[str, str]) -> AsyncGenerator[CommittedRow, None]:
        """Committed rows from version 1, each once and in order; the last has `finish` set.

        Raises Overloaded or NotReady before the first row, or any typed error later, a ProtocolError when nobody has
        rows that follow from the prompt; closing the generator stops reading (the coordinator then waits for another
        reader, and cancels).
        """
        ...

    async def start(self, request: Request, meta: Mapping[str, str]) -> Snapshot:
        """Create the request, or find it: its record, whose request and meta are the first start's.

        Raises what `generate` raises before the first row. Somebody is expected to `attach` within the grace time.
        """
        ...

    def attach(self, request: Request) -> AsyncGenerator[CommittedRow, None]:
        """Committed rows of a request that exists, from version 1; as `generate` otherwise. Raises RequestNotFound."""
        ...

    async def lookup(self, request_id: str) -> Snapshot:
        """The record as it is now. Raises RequestNotFound, NotReady."""
        ...

    async def ledger(self, request_id: str) -> RequestLedger:
        """The record as it is now, and what its rounds say beyond their rows. Raises as `lookup`."""
        ...

    async def cancel(self, request_id: str) -> bool:
        """End the request. True if it is cancelled, now or before; False if it ended otherwise, or never was."""
        ...

    async def status(self) -> Sequence[CoordinatorStatus]:
        """The status of each coordinator that answered in time; empty if none did."""
        ...

    async def workers(self) -> Sequence[Worker]:
        """Who is registered, by kind and id; the last known while the registry does not answer."""
        ...

    async def close(self) -> None:
        """Let go of every connection."""
        ...
