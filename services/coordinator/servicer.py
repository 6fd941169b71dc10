"""The Coordinator service. A reader's end is not the request's: see audience.py."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Protocol

import grpc

from seqmtp_serve.errors import RequestNotFound, SeqMTPError
from seqmtp_serve.ports import FrontierStore
from seqmtp_serve.request import CommittedRow, Request
from seqmtp_serve.rounds import RoundDriver
from services.coordinator.audience import Audience
from services.coordinator.target_link import GrpcTargetGroup
from services.rpc import status
from services.rpc.convert import from_wire, to_wire
from services.rpc.wire import common, coordinator, coordinator_rpc
from services.telemetry import request_span

log = logging.getLogger(__name__)


class ReadableStore(FrontierStore, Protocol):
    """A store whose rows can be followed by a process that does not own the request."""

    def follow(self, request_id: str, after_version: int = 0) -> AsyncIterator[CommittedRow]: ...


class CoordinatorServicer(coordinator_rpc.CoordinatorServicer):
    """Starts requests on the driver, and streams committed rows from it, or else from the store."""

    def __init__(
        self, coordinator_id: str, driver: RoundDriver, target: GrpcTargetGroup, store: ReadableStore, *, grace_s: float
    ) -> None:
        self._id = coordinator_id
        self._driver = driver
        self._target = target
        self._store = store
        self._audience = Audience(grace_s=grace_s, on_abandoned=self._abandon)
        self._cancelling: set[asyncio.Task[None]] = set()

    async def Generate(self, request: coordinator.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        wanted = from_wire(Request, request.request)
        try:
            with request_span("generate", wanted.request_id, request.meta):
                await self._stream(wanted.request_id, await self._driver.submit(wanted), context)
        except SeqMTPError as error:
            await status.abort(context, error)

    async def Attach(self, request: coordinator.AttachRequest, context: grpc.aio.ServicerContext) -> None:
        try:
            await self._stream(request.request_id, self._rows(request.request_id, request.after_version), context)
        except SeqMTPError as error:
            await status.abort(context, error)

    async def Cancel(
        self, request: coordinator.CancelRequest, context: grpc.aio.ServicerContext
    ) -> coordinator.CancelReply:
        try:
            return coordinator.CancelReply(found=await self._driver.cancel(request.request_id))
        except SeqMTPError as error:
            await status.abort(context, error)

    async def Status(
        self, request: coordinator.StatusRequest, context: grpc.aio.ServicerContext
    ) -> coordinator.StatusReply:
        await self._target.look_at_proposer()
        driver = self._driver.status()
        mtp_ready = driver.target_ready and self._target.proposer_ready
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
        )
        if driver.info is not None:
            reply.model, reply.numerics = driver.info.model, driver.info.numerics
            reply.max_model_len, reply.max_depth = driver.info.max_model_len, driver.info.max_depth
        return reply

    def close(self) -> None:
        """Abandon no request any more: the driver is about to hand them all back to the record."""
        self._audience.close()
        for task in self._cancelling:
            task.cancel()

    def _rows(self, request_id: str, after_version: int) -> AsyncIterator[CommittedRow]:
        """From the driver if the request is live here, else from the record."""
        try:
            return self._driver.attach(request_id, after_version)
        except RequestNotFound:
            return self._store.follow(request_id, after_version)

    async def _stream(
        self, request_id: str, rows: AsyncIterator[CommittedRow], context: grpc.aio.ServicerContext
    ) -> None:
        with self._audience.reading(request_id):
            async for row in rows:
                message: common.CommittedRow = to_wire(row)
                await context.write(message)

    def _abandon(self, request_id: str) -> None:
        task = asyncio.create_task(self._cancel_abandoned(request_id))
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)

    async def _cancel_abandoned(self, request_id: str) -> None:
        try:
            if await self._driver.cancel(request_id):
                log.info("%s cancelled: nobody read it any more", request_id)
        except SeqMTPError as error:
            log.warning("%s could not be cancelled, it runs to its end: %s", request_id, error)
