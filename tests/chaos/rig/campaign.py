"""Streams under faults, one fault after the other, then the verdict.

A fault's streams begin, the point is armed, the first to reach it waits there while the harm is done, and goes on. The
next fault comes when every stream has ended and every worker is back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import monotonic

import httpx

from tests.chaos.checker import Violation, check
from tests.chaos.history import ClientEvent, History
from tests.chaos.rig.client import StreamClient
from tests.chaos.rig.faults import Fault, harm, nothing
from tests.chaos.rig.held import allowed, held, process_levels
from tests.chaos.rig.points import Points
from tests.chaos.rig.requests import Wish
from tests.chaos.rig.store_log import Record, StoreLog
from tests.chaos.rig.workers import Workers

STREAMS_S = 90.0  # for all streams of one fault
IMPATIENT_S = 1.0  # a client whose gateway is stopped for good, or cut off, asks another one after so long
GATEWAY_GONE = ("stay stopped", "partition", "stay partitioned")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultResult:
    """`silence_s`: the longest wait for a row after the fault, of each stream then under way. `missed`: nobody came."""

    fault: Fault
    num_streams: int
    breaks: tuple[str, ...]  # why connections broke under clients
    silence_s: tuple[float, ...]
    resumes_s: tuple[float, ...]
    missed: bool = False
    num_forgotten: int = 0  # rows that clients had, and the store that was failed over to had not


class Campaign:
    """Use inside `run`'s workers. `wishes` are drawn from in turn."""

    def __init__(self, workers: Workers, points: Points, wishes: Sequence[Wish], rng: Random) -> None:
        self._workers, self._points, self._wishes, self._rng = workers, points, wishes, rng
        self._log = StoreLog(workers.store.directory)
        workers.on_fail_over = self._failed_over
        self._events: list[ClientEvent] = []
        self._num_started = 0
        self.results: list[FaultResult] = []
        self._clients: list[StreamClient] = []  # of the fault under way
        self._num_forgotten = 0
        self._levels: Mapping[str, int] = {}  # of each process, idle, before most clients hung up
        self.held: Mapping[str, tuple[int, int]] = {}  # then, and when all was over

    async def under(self, fault: Fault, num_clients: int) -> FaultResult:
        """Clients through one fault, which begins once whom it can hit is there."""
        await self._workers.ready(fault.role)
        async with self._http() as http:
            leaving = fault.role == "gateway" and fault.how in GATEWAY_GONE  # nobody can tell its clients
            patience = {"silence_s": IMPATIENT_S} if leaving else {}
            clients = [self._client(http, **patience) for _ in range(num_clients)]
            self._clients, self._num_forgotten = clients, 0
            reading = [asyncio.ensure_future(client.run(self._log.read)) for client in clients]
            await self._under_way(clients)
            fault_at, missed, undo = monotonic(), False, nothing
            try:
                async with self._points.caught(fault.at, fault.point) as hit:
                    fault_at = monotonic()
                    undo = await harm(fault, hit, self._workers)
                if not fault.outlasts_streams:
                    await undo()
            except TimeoutError:
                missed = True
            await self._finish(clients, reading)
            if fault.outlasts_streams:
                await undo()
        choices = [choice for client in clients for choice in client.choices]
        silences = [choice.silence_s(fault_at) for choice in choices]
        result = FaultResult(
            fault=fault,
            num_streams=len(choices),
            breaks=tuple(broken.reason for client in clients for broken in client.breaks),
            silence_s=tuple(sorted(value for value in silences if value is not None)),
            resumes_s=tuple(value for client in clients for value in client.resumes_s),
            missed=missed,
            num_forgotten=self._num_forgotten,
        )
        self.results.append(result)
        return result

    async def disconnects(self, number: int, at_once: int) -> None:
        """So many clients that hang up after a random row, beside canaries that stay to their end.

        After the first of them every connection is open that others need: from there on nothing may grow.
        """
        left = number
        await self._workers.ready()
        async with self._http() as http:
            while left > 0:
                batch = min(left, at_once)
                left -= batch
                leaving = [self._client(http) for _ in range(batch)]
                canaries = [self._client(http) for _ in range(1)]
                reading = [
                    asyncio.ensure_future(client.run(self._log.read, leave_after=self._rng.randint(1, 12)))
                    for client in leaving
                ]
                reading += [asyncio.ensure_future(client.run(self._log.read)) for client in canaries]
                await self._finish([*leaving, *canaries], reading)
                self._levels = self._levels or await process_levels(self._workers)

    async def verdict(self, *, with_leaks: bool) -> tuple[tuple[Violation, ...], History]:
        """Wait until all is idle, count what is held, and judge everything since the start."""
        after = await held(self._workers) if with_leaks else {}
        before, may_hold = dict.fromkeys(after, 0) | self._levels, dict.fromkeys(after, 0) | allowed(self._levels)
        if with_leaks and self._levels:
            after |= await process_levels(self._workers, at_most=may_hold)
        self.held = {name: (before[name], after[name]) for name in before if name in after}
        self._log.read()
        history = History(
            clients=tuple(self._events),
            store=tuple(self._log.events),
            held_before=may_hold,
            held_after={name: level for name, (_, level) in self.held.items()},
        )
        return check(history), history

    def _client(self, http: httpx.AsyncClient, **options: float) -> StreamClient:
        self._num_started += 1
        wish = self._wishes[self._num_started % len(self._wishes)]
        return StreamClient(f"stream-{self._num_started}", wish, self._workers.gateways, http, self._rng, **options)

    def _failed_over(self, directory: Path, records: Mapping[str, Record]) -> None:
        """The store that was promoted goes on with these records; nobody can reach it yet."""
        self._log.go_on_with(directory, records, promised=self._workers.settings.store.durability == "C3")
        for choice in (choice for client in self._clients for choice in client.choices):
            version = records[choice.request_id].version if choice.request_id in records else 0
            self._num_forgotten += sum(row.version > version for row in choice.rows)

    async def _under_way(self, clients: Sequence[StreamClient]) -> None:
        """Until half of the streams have begun."""
        async with asyncio.timeout(STREAMS_S):
            while sum(client.num_rows > 0 for client in clients) * 2 < len(clients):
                await asyncio.sleep(0.005)

    async def _finish(self, clients: Sequence[StreamClient], reading: Sequence[asyncio.Future[None]]) -> None:
        _, late = await asyncio.wait(reading, timeout=STREAMS_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        for task in reading:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error  # the rig's own
        for client in clients:
            self._events += client.events()

    @staticmethod
    def _http() -> httpx.AsyncClient:
        return httpx.AsyncClient(limits=httpx.Limits(max_connections=None))
