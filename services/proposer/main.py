"""The proposer process: the MTP module behind one gRPC port, announced in the registry."""

from __future__ import annotations

import asyncio
import logging

import torch

from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.engine.memory import storages
from seqmtp_serve.engine.proposer import ProposerEngine
from seqmtp_serve.model.huge_pages import use_huge_pages
from services.accounts import AccountBook
from services.core_config import proposer_config
from services.memory import give_back
from services.proposer.servicer import ProposerServicer
from services.proposer.worker import PassLoop
from services.rpc.channel import new_server
from services.rpc.identity import new_id, output_head_fingerprint
from services.rpc.serving import open_registry, served, until_stopped
from services.rpc.wire import proposer, proposer_rpc
from services.settings import Settings
from services.telemetry import exporting

log = logging.getLogger(__name__)


async def run(settings: Settings, stop: asyncio.Event) -> None:
    """Serve until `stop`. Raises MtpIncomplete when there is no MTP module to serve, and what breaks the engine."""
    proposer_id = new_id("proposer")
    checkpoint, engine = await asyncio.to_thread(_load, settings)
    passes = PassLoop(engine)
    server = new_server()
    servicer = ProposerServicer(passes, _info(proposer_id, checkpoint, settings))
    proposer_rpc.add_ProposerServicer_to_server(servicer, server)
    port = settings.rpc.proposer_port
    with exporting("proposer", proposer_id):
        async with (
            open_registry(settings) as registry,
            # No grace: each stream's end sends a target group to another proposer, and costs it one round's drafts.
            served(server, registry, settings, kind="proposer", id=proposer_id, port=port, grace_s=0.0) as presence,
        ):
            log.info("%s of %s serves at %s", proposer_id, checkpoint.name, presence.address)
            held = sum(storages(engine.modules).values())
            log.info("it holds %.1f MiB of weights: the MTP module, embedding, final norm and head", held / 2**20)
            kernels = ", ".join(f"{kind} {name}" for kind, name in engine.kernels.items())
            log.info("on %s, kernels: %s", engine.device, kernels)
            model = settings.model.served_name or checkpoint.name
            account = AccountBook(registry.redis).keep(lambda: passes.account(proposer_id, model))
            await until_stopped(stop, passes.run(), account)


def _load(settings: Settings) -> tuple[Checkpoint, ProposerEngine]:
    torch.set_num_threads(settings.engine.num_threads)
    checkpoint = open_checkpoint(settings.model.path, settings.model.mtp)
    tensors = checkpoint.mtp_tensors()
    assert checkpoint.mtp_config is not None, "the MTP gate passed"
    engine = ProposerEngine(proposer_config(settings), checkpoint.config, checkpoint.mtp_config, tensors)
    give_back()
    use_huge_pages()
    return checkpoint, engine


def _info(proposer_id: str, checkpoint: Checkpoint, settings: Settings) -> proposer.ProposerInfo:
    shared = checkpoint.manifest.target.fingerprints
    return proposer.ProposerInfo(
        proposer_id=proposer_id,
        model=checkpoint.name,
        hidden_size=checkpoint.config.hidden_size,
        max_depth=settings.speculation.num_speculative_tokens,
        embedding_fingerprint=shared.embedding,
        output_head_fingerprint=output_head_fingerprint(shared),
        manifest_fingerprint=checkpoint.manifest.fingerprint,
    )
