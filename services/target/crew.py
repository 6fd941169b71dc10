"""The leader's side of a gang: who has joined, shares out and reports in, and the moment one of them is lost.

A killed rank's stream ends with its socket. A stopped one is found by gRPC's own pings (`services/rpc/channel.py`):
a thread of the peer's gRPC answers them, so neither a long step nor a busy event loop looks like a death.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import TypeAlias

import grpc

from seqmtp_serve.errors import InternalError, SeqMTPError, TargetIncomplete, Unavailable
from seqmtp_serve.ports import StepPlan, StepReport, TargetInfo
from services.rpc import status
from services.rpc.convert import from_wire, to_wire
from services.rpc.duplex import write_while
from services.rpc.wire import gang, gang_rpc

RankStream: TypeAlias = grpc.aio.ServicerContext[gang.RankFrame, gang.LeaderFrame]

log = logging.getLogger(__name__)


class Crew(gang_rpc.GangServicer):
    """Ranks 1 to world_size - 1 of one gang. `send` may be called from any thread, the rest from the event loop."""

    def __init__(self, gang_id: str, world_size: int, manifest_fingerprint: str) -> None:
        self._gang_id, self._fingerprint = gang_id, manifest_fingerprint
        self._ranks = range(1, world_size)
        self._loop = asyncio.get_running_loop()
        self._out: dict[int, asyncio.Queue[gang.LeaderFrame]] = {}  # of each rank that has joined
        self._ready: dict[int, TargetInfo] = {}
        self._reports: dict[int, Future[StepReport]] = {}  # of the step under way
        self._changed = asyncio.Condition()
        self._lost: str | None = None

    async def joined(self) -> None:
        """Wait until every rank has said hello. Raises Unavailable if one is lost."""
        await self._until(lambda: len(self._out) == len(self._ranks))

    def form(self) -> None:
        """Tell the ranks that all are here."""
        for frames in self._out.values():
            frames.put_nowait(gang.LeaderFrame(form=gang.Form()))

    async def ready(self) -> Sequence[TargetInfo]:
        """What each rank can do, once all have read their weights. Raises Unavailable if one is lost."""
        await self._until(lambda: len(self._ready) == len(self._ranks))
        return [self._ready[rank] for rank in self._ranks]

    async def watch(self) -> None:
        """Wait until a rank is lost, and raise Unavailable that says which."""
        await self._until(lambda: False)

    async def lose(self, reason: str) -> None:
        """The gang is over: the step under way and all later ones raise Unavailable. The first reason stays."""
        if self._lost is None:
            log.warning("the gang is over: %s", reason)
            self._lost = reason
        for report in self._reports.values():
            if not report.done():
                report.set_exception(Unavailable(self._lost))
        async with self._changed:
            self._changed.notify_all()

    def send(self, shares: Sequence[StepPlan]) -> list[Future[StepReport]]:
        """Hand one share to each rank. A future raises Unavailable when a rank, any rank, is lost."""
        futures: list[Future[StepReport]] = [Future() for _ in shares]
        self._loop.call_soon_threadsafe(self._send, shares, futures)
        return futures

    def _send(self, shares: Sequence[StepPlan], futures: Sequence[Future[StepReport]]) -> None:
        self._reports = dict(zip(self._ranks, futures, strict=True))
        for rank, share in zip(self._ranks, shares, strict=True):
            if self._lost is not None:
                self._reports[rank].set_exception(Unavailable(self._lost))
            else:
                self._out[rank].put_nowait(gang.LeaderFrame(share=to_wire(share)))

    async def Join(self, request: AsyncIterator[gang.RankFrame], context: RankStream) -> None:
        try:
            hello = await _read(context)
            rank, frames = self._admit(hello.hello)
        except SeqMTPError as error:
            await status.abort(context, error)
        log.info("rank %d joined from %s", rank, context.peer())
        await self._notify()
        with contextlib.suppress(grpc.aio.BaseError):
            await write_while(self._listen(rank, context), frames, context.write)

    async def _listen(self, rank: int, context: RankStream) -> None:
        reason = "its stream ended"
        try:
            while True:
                await self._receive(rank, await _read(context))
        except (SeqMTPError, ValueError) as error:
            reason = str(error)
        except grpc.aio.BaseError as error:
            reason = f"its stream broke ({error})"
        finally:
            await asyncio.shield(self.lose(f"rank {rank} is lost: {reason}"))

    def _admit(self, hello: gang.Hello) -> tuple[int, asyncio.Queue[gang.LeaderFrame]]:
        if hello.gang_id != self._gang_id or hello.rank not in self._ranks or hello.rank in self._out:
            raise InternalError(f"rank {hello.rank} of {hello.gang_id or 'no gang'} is not expected here")
        if hello.manifest_fingerprint != self._fingerprint:
            raise TargetIncomplete(f"rank {hello.rank} has opened another checkpoint than its leader")
        self._out[hello.rank] = asyncio.Queue()
        return hello.rank, self._out[hello.rank]

    async def _receive(self, rank: int, frame: gang.RankFrame) -> None:
        match frame.WhichOneof("what"):
            case "ready":
                self._ready[rank] = from_wire(TargetInfo, frame.ready)
                await self._notify()
            case "report" if rank in self._reports and not self._reports[rank].done():
                self._reports[rank].set_result(from_wire(StepReport, frame.report))
            case other:
                raise InternalError(f"it sent {other or 'nothing'}, which was not its turn")

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._lost is not None or holds())
        if self._lost is not None:
            raise Unavailable(self._lost)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def _read(context: RankStream) -> gang.RankFrame:
    frame = await context.read()
    if not isinstance(frame, gang.RankFrame):
        raise Unavailable("its stream ended")
    return frame
