"""The target process: the main model behind one gRPC port, linked to a proposer it finds in the registry."""

from __future__ import annotations

import asyncio
import logging

import torch

from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.engine.target import TargetEngine
from seqmtp_serve.errors import InternalError
from seqmtp_serve.model.huge_pages import use_huge_pages
from services.core_config import engine_config
from services.fault_points import fault_points
from services.memory import give_back
from services.rpc.channel import new_server
from services.rpc.discovery import discover
from services.rpc.identity import new_id
from services.rpc.serving import open_registry, served, until_stopped
from services.rpc.wire import target_rpc
from services.settings import Settings
from services.target.fit import judge
from services.target.proposer_link import GrpcProposer
from services.target.servicer import TargetServicer
from services.target.step_thread import StepThread

log = logging.getLogger(__name__)


async def run(settings: Settings, stop: asyncio.Event) -> None:
    """Serve until `stop`. Raises TargetIncomplete when the model cannot be served, InternalError when a step broke.

    Without a proposer it serves all the same: plain decoding, and a new look for one every moment.
    """
    group_id = new_id("target")
    checkpoint = await asyncio.to_thread(_open, settings)
    async with open_registry(settings) as registry:
        link = GrpcProposer(discover(registry, "proposer", group_id), judge(checkpoint))
        engine = await asyncio.to_thread(_load, settings, checkpoint, link, group_id)
        steps = StepThread(engine, reached=fault_points("target", settings))
        server = new_server()
        target_rpc.add_TargetServicer_to_server(TargetServicer(steps, engine.info(), link), server)
        port = settings.rpc.target_port
        try:
            async with served(server, registry, settings, kind="target", id=group_id, port=port) as address:
                log.info("%s of %s serves at %s", group_id, checkpoint.name, address)
                await until_stopped(stop, link.run(), steps.watch(), _until_broken(steps))
        finally:
            steps.close()


def _open(settings: Settings) -> Checkpoint:
    torch.set_num_threads(settings.engine.num_threads)
    return open_checkpoint(settings.model.path, settings.model.mtp)


def _load(settings: Settings, checkpoint: Checkpoint, link: GrpcProposer, group_id: str) -> TargetEngine:
    engine = TargetEngine(
        engine_config(settings),
        checkpoint.config,
        checkpoint.target_tensors(),
        link if settings.speculation.num_speculative_tokens else None,
        name=checkpoint.name,
        fingerprint=checkpoint.manifest.fingerprint,
        group_id=group_id,
    )
    give_back()
    use_huge_pages()
    return engine


async def _until_broken(steps: StepThread) -> None:
    await steps.failed.wait()
    raise InternalError("a step broke the engine: its state is no longer known, a new worker must take over")
