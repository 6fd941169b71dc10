"""The coordinator's view of a remote target group: ports.TargetGroup over one long-lived Step stream.

Only `info` connects. When the stream breaks, every step under way raises Unavailable, and so does every later step
until `info` has found a group again: a plan made for a lost group can then never reach the next one. A group that says
that it is ending is left at the end of a step, as soon as there is another; if there is none, it finishes what it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

import grpc

from seqmtp_serve.errors import NotReady, SeqMTPError, Unavailable
from seqmtp_serve.ports import StepPlan, StepReport, TargetInfo
from services.coordinator.round_spans import RoundSpans
from services.rpc import channel, status
from services.rpc.convert import from_wire, to_wire
from services.rpc.discovery import Discover
from services.rpc.wire import target, target_rpc

INFO_TIMEOUT_S = 2.0
LOST_TIMEOUT_S = 0.4  # for the group that was just lost, where there is another: if only its connection was, it answers
LOOK_AGAIN_S = 1.0  # an idle group's word about its proposer is old after this
ANSWER_MARGIN_S = 2.0  # past a plan's deadline, which the target keeps

_MOVED = Unavailable("it is ending, and another goes on")
log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Connection:
    """One group, as long as its stream lasts."""

    address: str
    channel: grpc.aio.Channel
    stub: target_rpc.TargetStub
    call: grpc.aio.StreamStreamCall[target.StepPlan, target.StepReport]
    waiting: dict[int, asyncio.Future[StepReport]] = field(default_factory=dict)  # by step id
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)  # one write at a time; waiters keep their order
    reading: asyncio.Task[None] | None = None
    draining: bool = False  # it said that it is ending
    leaving: bool = False  # and there is another: not one more step


class GrpcTargetGroup:
    """Implements ports.TargetGroup. One event loop; steps of several cohorts may be under way together."""

    def __init__(self, discover: Discover, spans: RoundSpans | None = None) -> None:
        self._discover = discover
        self.spans = RoundSpans(0.0) if spans is None else spans
        self._connecting = asyncio.Lock()
        self._connection: _Connection | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._lost = ""  # the address of the group that was lost last
        self._news = asyncio.Event()  # the group has just said that it is ending
        self.detail = "no target group has been found yet"
        self.proposer_ready = False
        self.proposer_detail = "no target group has been found yet"
        self._heard_at = 0.0

    @property
    def ready(self) -> bool:
        """Whether a group is connected."""
        return self._connection is not None

    async def info(self) -> TargetInfo:
        """What the group can do, asked now; connects first. Raises NotReady, or Unavailable if the group was lost."""
        async with self._connecting:
            if self._connection is None:
                return await self._connect()
            return await self._ask(self._connection.stub)

    async def look_at_proposer(self) -> None:
        """Bring `proposer_ready` and `proposer_detail` up to date: reports do, but an idle group sends none."""
        connection = self._connection
        if connection is not None and monotonic() - self._heard_at > LOOK_AGAIN_S:
            with contextlib.suppress(Unavailable):  # a lost group is for the stream to find
                await self._ask(connection.stub)

    async def step(self, plan: StepPlan) -> StepReport:
        """See ports.TargetGroup. Raises Unavailable when the group is gone, or does not answer in time."""
        connection = self._connection
        if connection is not None and connection.leaving:
            self._drop(connection, _MOVED)
        if connection is None or connection.leaving:
            raise Unavailable(self.detail)
        answer: asyncio.Future[StepReport] = asyncio.get_running_loop().create_future()
        connection.waiting[plan.step_id] = answer
        try:
            with self.spans.step(plan) as traced:
                message = to_wire(plan)
                message.traceparent = traced.traceparent
                async with asyncio.timeout(plan.deadline_ms / 1e3 + ANSWER_MARGIN_S):
                    async with connection.writing:
                        await connection.call.write(message)
                    report = traced.report = await answer
        except TimeoutError:
            self._drop(connection, Unavailable(f"step {plan.step_id} was not answered in time"))
            raise Unavailable(self.detail) from None
        except asyncio.CancelledError:  # whoever gave up does not know how far the step came: nor does anyone else
            self._drop(connection, Unavailable(f"step {plan.step_id} was given up"))
            raise
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as failure:
            answer.cancel()
            self._drop(connection, _meaning(failure))
            raise Unavailable(self.detail) from failure
        finally:
            connection.waiting.pop(plan.step_id, None)
        self.proposer_ready, self._heard_at = report.proposer_ready, monotonic()
        self._told(connection, report.draining)
        return report

    async def watch(self, period_s: float) -> None:
        """Ask the group how it is every `period_s`, until cancelled: between steps nothing else tells. Leave one that
        is ending as soon as there is another.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(period_s):
                    await self._news.wait()
            self._news.clear()
            if (connection := self._connection) is not None:
                with contextlib.suppress(Unavailable):  # the stream's own pings find a group that is lost
                    await self._ask(connection.stub)
                if connection.draining and await self._is_another(connection):
                    connection.leaving = True
                    if not connection.waiting:
                        self._drop(connection, _MOVED)

    async def close(self) -> None:
        """Let the group go; it releases what was admitted here."""
        if self._connection is not None:
            self._drop(self._connection, Unavailable("this coordinator is closing"))
        await asyncio.gather(*self._closing)

    async def _connect(self) -> TargetInfo:
        addresses = await self._addresses()
        for address in addresses:
            opened = channel.connect(address)
            try:
                stub = target_rpc.TargetStub(opened)
                lost = address == self._lost and len(addresses) > 1
                info = await self._ask(stub, LOST_TIMEOUT_S if lost else INFO_TIMEOUT_S)
                connection = _Connection(address=address, channel=opened, stub=stub, call=stub.Step())
            except Unavailable as error:
                self.detail = f"the target group at {address} does not answer: {error}"
                await opened.close()
                continue
            except BaseException:
                await opened.close()
                raise
            connection.reading = asyncio.create_task(self._read(connection))
            self._connection, self.detail = connection, ""
            log.info("using target group %s at %s", info.group_id, address)
            return info
        raise NotReady(self.detail)

    async def _is_another(self, connection: _Connection) -> bool:
        """Whether a group is there to move to: it answers, and is not ending itself."""
        for address in await self._addresses():
            if address != connection.address:
                async with channel.connect(address) as opened:
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        stub = target_rpc.TargetStub(opened)
                        answer = await stub.Info(target.TargetInfoRequest(), timeout=INFO_TIMEOUT_S)
                        return not answer.draining
        return False

    def _told(self, connection: _Connection, draining: bool) -> None:
        if draining and not connection.draining:
            connection.draining = True
            self._news.set()

    async def _addresses(self) -> Sequence[str]:
        try:
            addresses = await self._discover()
        except SeqMTPError as error:
            self.detail = f"target groups cannot be looked up: {error}"
            return ()
        if not addresses:
            self.detail = "no target group is registered"
        return addresses

    async def _ask(self, stub: target_rpc.TargetStub, timeout_s: float = INFO_TIMEOUT_S) -> TargetInfo:
        try:
            answer = await stub.Info(target.TargetInfoRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as failure:
            raise Unavailable(str(status.from_call(failure))) from failure
        self.proposer_ready, self.proposer_detail = answer.proposer_ready, answer.proposer_detail
        self._heard_at = monotonic()
        if (connection := self._connection) is not None and connection.stub is stub:
            self._told(connection, answer.draining)
        return from_wire(TargetInfo, answer)

    async def _read(self, connection: _Connection) -> None:
        """Hand reports to whoever waits for them until the stream ends."""
        error: SeqMTPError = Unavailable("the target group closed the stream")
        try:
            while (message := await connection.call.read()) is not grpc.aio.EOF:
                report = from_wire(StepReport, message)
                answer = connection.waiting.get(report.step_id)
                if answer is not None and not answer.done():
                    answer.set_result(report)
        except grpc.aio.AioRpcError as failure:
            error = status.from_call(failure)
        except asyncio.CancelledError:
            error = Unavailable("the stream was given up")
        except ValueError as malformed:
            error = Unavailable(f"the target group's report is malformed: {malformed}")
        self._drop(connection, error)

    def _drop(self, connection: _Connection, error: SeqMTPError) -> None:
        if self._connection is not connection:
            return
        self._connection, self._lost = None, connection.address
        self.detail = f"the target group is lost: {error}"
        self.proposer_ready, self.proposer_detail = False, self.detail
        log.warning("%s", self.detail)
        for answer in connection.waiting.values():
            if not answer.done():
                answer.set_exception(Unavailable(self.detail))
        connection.call.cancel()  # ends `_read` as well
        closing = asyncio.create_task(connection.channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


def _meaning(failure: BaseException) -> SeqMTPError:
    if isinstance(failure, grpc.aio.AioRpcError):
        return status.from_call(failure)
    return Unavailable("the stream is closed")
