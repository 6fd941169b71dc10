"""Coordinators over gRPC. A stream that breaks is opened again, and rows that were seen are passed over.

Any coordinator gives the rows of any request, and takes over one whose coordinator is gone: so opening a stream again
anywhere is right. It is read from its first row, and `splice.py` passes over what was given. A row that does not follow
from the prompt and the rows before it breaks a stream as a lost connection does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import grpc

from seqmtp_serve.errors import ProtocolError, Unavailable
from seqmtp_serve.frontier.round_notes import RequestLedger
from seqmtp_serve.frontier.row_chain import RowChain, check_record
from seqmtp_serve.ports import Snapshot
from seqmtp_serve.request import CommittedRow, Request
from services.gateway.attempts import Attempts, Silent, WrongRow
from services.gateway.coordinators import CoordinatorStatus, Worker
from services.gateway.directory import Directory
from services.gateway.pulse import Pulses
from services.gateway.row_streams import RowStreams
from services.gateway.splice import Splice
from services.rpc.channel import connect
from services.rpc.convert import from_wire, to_wire
from services.rpc.status import from_call
from services.rpc.wire import coordinator as messages
from services.rpc.wire import coordinator_rpc

STATUS_TIMEOUT_S = 1.0
MAX_STARTED = 1024
ASK_TIMEOUT_S = 15.0  # longer than a coordinator waits for the store
Answer = TypeVar("Answer")

log = logging.getLogger(__name__)


class GrpcCoordinators:
    """Every coordinator in the directory, as one. Channels belong to the event loop that first used this object.

    `failover_s` bounds how long a broken stream waits for a coordinator to go on with. `wrong_row` is told the code of
    the error that each refused row or record met. Without `shared` each stream is a call of its own.
    """

    def __init__(
        self,
        directory: Directory,
        failover_s: float = 20.0,
        *,
        wrong_row: Callable[[str], None] = lambda code: None,
        shared: bool = True,
    ) -> None:
        self._directory = directory
        self._failover_s, self._wrong_row = failover_s, wrong_row
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._turn = itertools.count()
        self._pulses = Pulses(self._channel)
        self._readings = RowStreams(self._channel, self._pulses, shared=shared)
        self._started: dict[str, str] = {}  # where a request was started, until it is read

    async def generate(self, request: Request, meta: Mapping[str, str]) -> AsyncGenerator[CommittedRow, None]:
        """See CoordinatorClient."""
        opening = messages.GenerateRequest(request=to_wire(request), meta=dict(meta), heartbeats=True)
        async with contextlib.aclosing(self._read(request, opening)) as rows:
            async for row in rows:
                yield row

    async def start(self, request: Request, meta: Mapping[str, str]) -> Snapshot:
        """See CoordinatorClient."""
        asked = messages.GenerateRequest(request=to_wire(request), meta=dict(meta))
        address, record = await self._ask("Start", asked, self._record)
        self._started[request.request_id] = address
        if len(self._started) > MAX_STARTED:  # those of the background are not read here
            del self._started[next(iter(self._started))]
        return record

    def attach(self, request: Request) -> AsyncGenerator[CommittedRow, None]:
        """See CoordinatorClient."""
        return self._read(request, None)

    async def lookup(self, request_id: str) -> Snapshot:
        """See CoordinatorClient."""
        _, record = await self._ask("Lookup", messages.LookupRequest(request_id=request_id), self._record)
        return record

    async def ledger(self, request_id: str) -> RequestLedger:
        """See CoordinatorClient."""
        _, ledger = await self._ask("Ledger", messages.LookupRequest(request_id=request_id), self._request_ledger)
        return ledger

    async def cancel(self, request_id: str) -> bool:
        """See CoordinatorClient."""
        asked = messages.CancelRequest(request_id=request_id)
        _, found = await self._ask("Cancel", asked, lambda _, reply: bool(reply.found))
        return found

    async def status(self) -> Sequence[CoordinatorStatus]:
        """See CoordinatorClient."""
        addresses = await self._directory.addresses()
        await self._forget_absent(addresses)
        replies = await asyncio.gather(*map(self._status_of, addresses))
        return [reply for reply in replies if reply is not None]

    async def workers(self) -> Sequence[Worker]:
        """See CoordinatorClient."""
        return await self._directory.workers()

    async def close(self) -> None:
        """Close every channel and the directory; streams end."""
        await self._readings.close()
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(channel.close() for channel in channels))
        await self._directory.close()

    async def _read(
        self, request: Request, opening: messages.GenerateRequest | None
    ) -> AsyncGenerator[CommittedRow, None]:
        """Rows from the first on, however often the connection breaks. Without `opening` the request exists."""
        request_id = request.request_id
        first = self._started.pop(request_id, "")
        attempts, splice = Attempts(self._directory, self._turn, self._failover_s, first), Splice()
        while True:
            address = await attempts.next()
            wanted: messages.GenerateRequest | messages.AttachRequest
            if opening is not None and not splice.began:
                wanted = opening
            else:
                wanted = messages.AttachRequest(request_id=request_id, heartbeats=True)
            splice.read_again()
            chain = RowChain(request)
            reading = self._readings.rows(address, wanted, impatient=attempts.is_impatient)
            try:
                async with contextlib.aclosing(reading) as rows:
                    async for row in rows:
                        with self._refusing(address):
                            chain.take(row)
                        if (new := splice.take(row)) is not None:
                            attempts.progressed()
                            yield new
                        if row.finish is not None:
                            return
                raise Unavailable("the coordinator's stream ended early")
            except Unavailable as error:
                attempts.lost(error)

    async def _ask(self, method: str, request: Any, take: Callable[[str, Any], Answer]) -> tuple[str, Answer]:
        """One answer from whoever gives it, each coordinator tried once; and the address it came from.

        `take` makes of a message what it says, and may find it wrong.
        """
        attempts = Attempts(self._directory, self._turn, self._failover_s)
        while True:
            address = await attempts.next()
            stub = coordinator_rpc.CoordinatorStub(self._channel(address))
            call = getattr(stub, method)(request, timeout=ASK_TIMEOUT_S)
            try:
                answer = self._pulses.unless_silent(address, call) if attempts.is_impatient else call
                return address, take(address, await answer)
            except (Silent, WrongRow) as error:
                attempts.lost(error)
            except grpc.aio.AioRpcError as failure:
                refusal = from_call(failure)
                if not isinstance(refusal, Unavailable):
                    raise refusal from failure
                attempts.lost(refusal)

    def _record(self, address: str, message: messages.Record) -> Snapshot:
        """The record in a message from `address`. Raises WrongRow."""
        record = from_wire(Snapshot, message)
        with self._refusing(address):
            check_record(record)
        return record

    def _request_ledger(self, address: str, message: messages.RequestLedger) -> RequestLedger:
        """Likewise."""
        ledger = from_wire(RequestLedger, message)
        with self._refusing(address):
            check_record(ledger.record)
        return ledger

    @contextlib.contextmanager
    def _refusing(self, address: str) -> Iterator[None]:
        """What is found wrong inside becomes WrongRow, and is counted."""
        try:
            yield
        except ProtocolError as fault:
            log.warning("from the coordinator at %s: %s", address, fault)
            self._wrong_row(fault.code)
            raise WrongRow(fault) from fault

    async def _status_of(self, address: str) -> CoordinatorStatus | None:
        stub = coordinator_rpc.CoordinatorStub(self._channel(address))
        try:
            reply = await stub.Status(messages.StatusRequest(), timeout=STATUS_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None
        fields: dict[str, Any] = {field.name: getattr(reply, field.name) for field in reply.DESCRIPTOR.fields}
        maps = {"counters": dict(reply.counters), "gauges": dict(reply.gauges)}
        return CoordinatorStatus(**fields | maps)

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = connect(address)
        return self._channels[address]

    async def _forget_absent(self, addresses: Sequence[str]) -> None:
        """Close channels to coordinators that left and are not being read."""
        for address in set(self._channels) - set(addresses):
            if not self._readings.is_reading(address):
                channel = self._channels.pop(address)
                await self._readings.forget(address)
                await channel.close()
