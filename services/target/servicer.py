"""The Target service: Info, and one Step stream for each coordinator."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TypeAlias

import grpc

from seqmtp_serve.errors import InvalidField, SeqMTPError
from seqmtp_serve.ports import Release, StepPlan, StepReport, TargetInfo
from services.rpc import status
from services.rpc.convert import from_wire, to_wire
from services.rpc.duplex import write_while
from services.rpc.wire import target, target_rpc
from services.target.colocated import Link
from services.target.step_thread import StepThread

MAX_PLANS_AHEAD = 8  # plans one coordinator may send before the first is answered; then its stream is not read

PlanStream: TypeAlias = grpc.aio.ServicerContext[target.StepPlan, target.StepReport]

log = logging.getLogger(__name__)


class TargetServicer(target_rpc.TargetServicer):
    """Plans in, one report for each, in order. A stream's end releases what it admitted."""

    def __init__(self, steps: StepThread, info: TargetInfo, proposer: Link) -> None:
        self._steps = steps
        self._info = info
        self._proposer = proposer
        self._held: list[dict[str, int]] = []  # request id -> epoch, of what each open stream admitted
        self._draining = False

    @property
    def num_held(self) -> int:
        """Sequences that some coordinator has here."""
        return sum(map(len, self._held))

    def drain(self) -> None:
        """From now on every report says that this group is ending."""
        self._draining = True

    async def Info(self, request: target.TargetInfoRequest, context: object) -> target.TargetInfo:
        answer: target.TargetInfo = to_wire(self._info)
        answer.proposer_ready = self._proposer.ready
        answer.proposer_detail = self._proposer.detail
        answer.draining = self._draining
        return answer

    async def Step(self, request: AsyncIterator[target.StepPlan], context: PlanStream) -> None:
        held: dict[str, int] = {}
        self._held.append(held)
        reports: asyncio.Queue[asyncio.Future[StepReport]] = asyncio.Queue(MAX_PLANS_AHEAD)
        log.info("coordinator at %s connected", context.peer())

        async def write(report: asyncio.Future[StepReport]) -> None:
            await context.write(to_wire(replace(await report, draining=self._draining)))

        try:
            await write_while(self._read(context, held, reports), reports, write)
        except SeqMTPError as error:
            await status.abort(context, error)
        finally:
            self._held = [other for other in self._held if other is not held]
            released = tuple(Release(request_id=name, epoch=epoch) for name, epoch in held.items())
            log.info("coordinator at %s left; %d sequences released", context.peer(), len(released))
            if released and not self._steps.failed.is_set():
                self._steps.submit(StepPlan(step_id=0, release=released))

    async def _read(
        self,
        context: PlanStream,
        held: dict[str, int],
        reports: asyncio.Queue[asyncio.Future[StepReport]],
    ) -> None:
        while isinstance(message := await context.read(), target.StepPlan):
            try:
                plan = from_wire(StepPlan, message)
            except ValueError as error:
                raise InvalidField(f"malformed step plan: {error}", param="plan") from error
            for release in plan.release:
                if held.get(release.request_id, -1) <= release.epoch:
                    held.pop(release.request_id, None)
            held.update((admit.ref.request_id, admit.ref.epoch) for admit in plan.admit)
            await reports.put(self._steps.submit(plan, message.traceparent))
