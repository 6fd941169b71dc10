"""The Coordinator service. A reader's end is not the request's: see audience.py."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, TypeAlias

import grpc

from seqmtp_serve.driver_status import DriverStatus
from seqmtp_serve.errors import InvalidField, SeqMTPError
from seqmtp_serve.request import CommittedRow, Request
from seqmtp_serve.rounds import RoundDriver
from services.accounts import Account
from services.coordinator.audience import Audience
from services.coordinator.lanes import Lanes
from services.coordinator.reader import RequestReader
from services.coordinator.round_ledger import RoundLedger
from services.coordinator.target_link import GrpcTargetGroup
from services.process_levels import process_levels
from services.rpc import status
from services.rpc.convert import from_wire, to_wire
from services.rpc.heartbeat import Heartbeats
from services.rpc.wire import common, coordinator, coordinator_rpc
from services.store.notes import pack_notes
from services.telemetry import request_span

SEARCH_S = 20.0  # as long as a gateway looks for another coordinator

Call: TypeAlias = grpc.aio.ServicerContext[Any, Any]  # with one answer: nothing is read or written through it
RowCall: TypeAlias = grpc.aio.ServicerContext[Any, common.CommittedRow]
LaneCall: TypeAlias = grpc.aio.ServicerContext[coordinator.LaneOrders, coordinator.LaneRows]

log = logging.getLogger(__name__)


class CoordinatorServicer(coordinator_rpc.CoordinatorServicer):
    """Starts requests on the driver, and streams committed rows from wherever they are.

    `admit` raises what a newcomer is to be turned away with, before anything is written.
    """

    def __init__(
        self,
        coordinator_id: str,
        driver: RoundDriver,
        target: GrpcTargetGroup,
        reader: RequestReader,
        ledger: RoundLedger,
        *,
        admit: Callable[[], None],
        grace_s: float,
        store_levels: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._id = coordinator_id
        self._driver = driver
        self._target = target
        self._reader, self._ledger = reader, ledger
        self._admit, self._store_levels = admit, store_levels
        self._audience = Audience(grace_s=grace_s, on_abandoned=self._abandon)
        self._cancelling: set[asyncio.Task[None]] = set()
        self._lanes: set[Lanes] = set()

    async def Generate(self, request: coordinator.GenerateRequest, context: RowCall) -> None:
        await _stream(self._generated(request), context, request.heartbeats)

    async def Start(self, request: coordinator.GenerateRequest, context: Call) -> coordinator.Record:
        try:
            wanted = _wanted(request)
            with request_span("start", wanted.request_id, request.meta) as span:
                self._target.spans.begin(wanted.request_id, span)
                await self._start(wanted, dict(request.meta))
                record: coordinator.Record = to_wire(await self._reader.find(wanted.request_id))
                return record
        except SeqMTPError as error:
            await status.abort(context, error)

    async def Attach(self, request: coordinator.AttachRequest, context: RowCall) -> None:
        await _stream(self._attached(request), context, request.heartbeats)

    async def Lanes(self, request: object, context: LaneCall) -> None:
        lanes = Lanes(self._laned)
        self._lanes.add(lanes)
        try:
            await lanes.serve(context.read, context.write)
        except SeqMTPError as error:
            await status.abort(context, error)
        finally:
            self._lanes.discard(lanes)

    async def Lookup(self, request: coordinator.LookupRequest, context: Call) -> coordinator.Record:
        try:
            record: coordinator.Record = to_wire(await self._reader.find(request.request_id))
            return record
        except SeqMTPError as error:
            await status.abort(context, error)

    async def Ledger(self, request: coordinator.LookupRequest, context: Call) -> coordinator.RequestLedger:
        try:
            ledger: coordinator.RequestLedger = to_wire(await self._ledger.of(request.request_id))
            return ledger
        except SeqMTPError as error:
            await status.abort(context, error)

    async def Notes(self, request: coordinator.LookupRequest, context: object) -> coordinator.RoundNotes:
        return pack_notes(self._ledger.notes.of(request.request_id))

    async def Owns(self, request: coordinator.OwnsRequest, context: object) -> coordinator.OwnsReply:
        return coordinator.OwnsReply(live=self._driver.is_live(request.request_id))

    async def Cancel(self, request: coordinator.CancelRequest, context: Call) -> coordinator.CancelReply:
        try:
            return coordinator.CancelReply(found=await self._driver.cancel(request.request_id))
        except SeqMTPError as error:
            await status.abort(context, error)

    async def Status(self, request: coordinator.StatusRequest, context: object) -> coordinator.StatusReply:
        await self._target.look_at_proposer()
        driver = self._driver.status()
        mtp_ready = driver.target_ready and self._target.proposer_ready
        reply = coordinator.StatusReply(
            coordinator_id=self._id,
            target_ready=driver.target_ready,
            target_detail=driver.target_detail,
            mtp_ready=mtp_ready,
            mtp_detail="" if mtp_ready else self._target.proposer_detail,
            running=driver.running,
            waiting=driver.waiting,
            max_waiting=driver.max_waiting,
            store_ready=driver.store_ready,
            store_detail=driver.store_detail,
            counters=driver.counters,
            draining=driver.draining,
            gauges=self._levels(driver),
        )
        if driver.info is not None:
            reply.model, reply.numerics = driver.info.model, driver.info.numerics
            reply.max_model_len, reply.max_depth = driver.info.max_model_len, driver.info.max_depth
        return reply

    @property
    def is_read(self) -> bool:
        """Whether anybody reads anything through this coordinator."""
        return self._audience.is_there

    def account(self, served_name: str | None) -> Account:
        """What this coordinator counted, to be kept after its end."""
        driver = self._driver.status()
        model = served_name or ("" if driver.info is None else driver.info.model)
        levels = self._levels(driver)
        return Account(kind="coordinator", id=self._id, model=model, counters=driver.counters, gauges=levels)

    def close(self) -> None:
        """Abandon no request any more: the driver is about to hand them all back to the record."""
        self._audience.close()
        for lanes in self._lanes:
            lanes.close()
        for task in self._cancelling:
            task.cancel()

    def expect_reader(self, request_id: str) -> None:
        """The request runs here and nobody reads it yet."""
        self._audience.expect(request_id)

    def expect_reader_back(self, request_id: str) -> None:
        """The same, of a request whose coordinator was lost: its readers have to find this one first."""
        self._audience.expect(request_id, at_least_s=SEARCH_S)

    def _levels(self, driver: DriverStatus) -> dict[str, float]:
        readers = float(self._audience.num_readers)
        return {**driver.gauges, **self._store_levels(), **process_levels(), "readers": readers}

    async def _start(self, request: Request, meta: Mapping[str, str]) -> None:
        if not self._driver.is_live(request.request_id):
            self._admit()
        await self._reader.start(request, meta)
        self.expect_reader(request.request_id)

    async def _generated(self, message: coordinator.GenerateRequest) -> AsyncGenerator[CommittedRow, None]:
        """What Generate streams."""
        wanted = _wanted(message)
        with request_span("generate", wanted.request_id, message.meta) as span:
            self._target.spans.begin(wanted.request_id, span)
            await self._start(wanted, dict(message.meta))
            async with contextlib.aclosing(self._read(wanted.request_id, 0)) as rows:
                async for row in rows:
                    yield row

    def _attached(self, message: coordinator.AttachRequest) -> AsyncGenerator[CommittedRow, None]:
        """What Attach streams."""
        return self._read(message.request_id, message.after_version)

    def _laned(self, opening: coordinator.LaneOpening) -> AsyncGenerator[CommittedRow, None]:
        """What one lane of Lanes streams."""
        if opening.WhichOneof("call") == "generate":
            return self._generated(opening.generate)
        return self._attached(opening.attach)

    async def _read(self, request_id: str, after_version: int) -> AsyncGenerator[CommittedRow, None]:
        """The rows, to a reader who counts as one until they end or it closes them."""
        rows = self._reader.rows(request_id, after_version)
        with self._audience.reading(request_id):
            async with contextlib.aclosing(rows):
                async for row in rows:
                    yield row

    def _abandon(self, request_id: str) -> None:
        if not self._driver.is_live(request_id) or "background" in self._driver.meta(request_id):
            return  # another coordinator's to judge, or nobody's
        task = asyncio.create_task(self._cancel_abandoned(request_id))
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)

    async def _cancel_abandoned(self, request_id: str) -> None:
        try:
            if await self._driver.cancel(request_id, abandoned=True):
                log.info("%s cancelled: nobody read it any more", request_id)
            elif self._driver.is_live(request_id):
                self.expect_reader(request_id)  # it is read through another coordinator
        except SeqMTPError as error:
            log.warning("%s could not be cancelled, it runs to its end: %s", request_id, error)


async def _stream(rows: AsyncGenerator[CommittedRow, None], context: RowCall, heartbeats: bool) -> None:
    """One call's rows, or the error that they end with."""
    try:
        async with contextlib.aclosing(rows), contextlib.aclosing(Heartbeats(context.write)) as beating:
            write = beating.tell if heartbeats else context.write
            async for row in rows:
                await write(to_wire(row))
    except SeqMTPError as error:
        await status.abort(context, error)


def _wanted(message: coordinator.GenerateRequest) -> Request:
    """The request in it. Raises InvalidField for one that no gateway sends."""
    try:
        return from_wire(Request, message.request)
    except ValueError as error:
        raise InvalidField(f"malformed request: {error}", param="request") from error
