"""A rank of a target group that is not its leader: it runs the shares it is given, and ends with the group.

It serves nobody but its leader. Whatever happens (the leader is lost, a step breaks or hangs), the process ends: what
it knew of its requests is in the store, and the next gang replays them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from typing import TypeAlias

import grpc

from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.engine.target import TargetEngine
from seqmtp_serve.errors import InternalError, SeqMTPError, Unavailable
from seqmtp_serve.model.device import usable_device
from seqmtp_serve.ports import StepPlan
from services.accounts import AccountBook
from services.entry import EXIT_FAULT, loop_factory, set_up_process
from services.rpc import channel, status
from services.rpc.convert import from_wire, to_wire
from services.rpc.discovery import discover
from services.rpc.serving import open_registry, until_stopped
from services.rpc.wire import gang, gang_rpc
from services.target.colocated import Link, open_link
from services.target.process_group import form, join_rendezvous
from services.target.rank_spec import RankSpec
from services.target.step_thread import StepThread
from services.target.worker import group_library, load, open_target, until_broken

LeaderStream: TypeAlias = grpc.aio.StreamStreamCall[gang.RankFrame, gang.LeaderFrame]

log = logging.getLogger(__name__)


async def run(spec: RankSpec) -> None:
    """Join the leader and serve it. Always raises: Unavailable once the leader is gone, or what broke here."""
    checkpoint = await asyncio.to_thread(open_target, spec.settings)
    async with open_registry(spec.settings) as registry, channel.connect(spec.leader) as connection:
        name = f"{spec.gang_id}.{spec.rank}"
        link = await open_link(spec.settings, checkpoint, discover(registry, "proposer", name))
        call = gang_rpc.GangStub(connection).Join()
        try:
            engine = await _join(call, spec, checkpoint, link)
            steps = StepThread(engine)
            name = spec.settings.model.served_name or checkpoint.name
            account = AccountBook(registry.redis).keep(lambda: steps.account(f"{spec.gang_id}.{spec.rank}", name))
            work = (link.run(), steps.watch(), until_broken(steps), _obey(call, steps), account)
            await until_stopped(asyncio.Event(), *work)
        except grpc.aio.AioRpcError as failure:
            raise Unavailable(f"the leader is lost: {status.from_call(failure)}") from failure


async def _join(call: LeaderStream, spec: RankSpec, checkpoint: Checkpoint, link: Link) -> TargetEngine:
    fingerprint = checkpoint.manifest.fingerprint
    hello = gang.Hello(gang_id=spec.gang_id, rank=spec.rank, manifest_fingerprint=fingerprint)
    await call.write(gang.RankFrame(hello=hello))
    if (await _read(call)).WhichOneof("what") != "form":
        raise InternalError("the leader sent a share before the group was formed")
    engine = await asyncio.to_thread(_load, spec, checkpoint, link)
    await call.write(gang.RankFrame(ready=to_wire(engine.info())))
    return engine


def _load(spec: RankSpec, checkpoint: Checkpoint, link: Link) -> TargetEngine:
    device = usable_device(spec.settings.engine.device)
    store, library = join_rendezvous(spec.rendezvous, spec.world_size), group_library(spec.settings, checkpoint)
    form(store, spec.rank, spec.world_size, spec.settings.rpc.host, library, device)
    return load(spec.settings, checkpoint, link, spec.gang_id, spec.rank)


async def _obey(call: LeaderStream, steps: StepThread) -> None:
    while True:
        frame = await _read(call)
        report = await steps.submit(from_wire(StepPlan, frame.share))
        await call.write(gang.RankFrame(report=to_wire(report)))


async def _read(call: LeaderStream) -> gang.LeaderFrame:
    frame = await call.read()
    if not isinstance(frame, gang.LeaderFrame):
        raise Unavailable("the leader ended the stream")
    return frame


def main() -> None:
    """`python -m services.target.rank`, with a RankSpec as JSON on standard input."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # they reach the whole process group; the leader decides, and kills
    spec = RankSpec.from_json(sys.stdin.read())
    set_up_process(f"target-{spec.rank}", spec.settings)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(run(spec))
    except SeqMTPError as error:
        log.error("%s: %s", error.code, error)
    except Exception:
        log.exception("the rank broke")
    finally:
        logging.shutdown()
        os._exit(EXIT_FAULT)  # a thread may hang in an exchange with a rank that is gone


if __name__ == "__main__":
    main()
