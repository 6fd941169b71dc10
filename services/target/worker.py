"""What every rank of a target group is made of, the only one of a group of one as well: checkpoint, link, engine."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.config import EngineConfig
from seqmtp_serve.engine.target import TargetEngine
from seqmtp_serve.errors import InternalError
from seqmtp_serve.model.backends.dispatch import DISPATCH, DispatchCase
from seqmtp_serve.model.deepseek import ExpertShare
from seqmtp_serve.model.deepseek_config import DeepseekConfig
from seqmtp_serve.model.expert_placement import experts_of
from seqmtp_serve.model.huge_pages import use_huge_pages
from seqmtp_serve.speculation.grammar import GrammarCompiler
from services.core_config import engine_config
from services.memory import give_back
from services.settings import Settings
from services.target.colocated import Link
from services.target.step_thread import StepThread

log = logging.getLogger(__name__)


def open_target(settings: Settings) -> Checkpoint:
    """The checkpoint, its headers read. Raises TargetIncomplete."""
    torch.set_num_threads(settings.engine.num_threads)
    return open_checkpoint(settings.model.path, settings.model.mtp)


def load(settings: Settings, checkpoint: Checkpoint, link: Link, group_id: str, rank: int = 0) -> TargetEngine:
    """Rank `rank`'s engine: its share of the pages and, of a model with experts, of the experts.

    With more than one rank the process group must be there already. Raises TargetIncomplete, and InvalidField when a
    backend is named that cannot run here.
    """
    share = _share(settings, checkpoint, rank)
    engine = TargetEngine(
        rank_config(engine_config(settings), settings.engine.target_ranks),
        checkpoint.config,
        checkpoint.target_tensors(None if share is None else share.experts),
        link if settings.speculation.num_speculative_tokens else None,
        name=checkpoint.name,
        fingerprint=checkpoint.manifest.fingerprint,
        group_id=group_id,
        share=share,
        grammars=GrammarCompiler(checkpoint.tokenizer, checkpoint.config.vocab_size),
    )
    kernels = ", ".join(f"{kind} {name}" for kind, name in engine.info().kernels.items())
    log.info("on %s, kernels: %s", engine.device, kernels)
    give_back()
    use_huge_pages()
    return engine


def rank_config(config: EngineConfig, world_size: int) -> EngineConfig:
    """One rank's part of what the group may hold, rounded up."""
    return replace(config, num_pages=-(-config.num_pages // world_size), max_batch=-(-config.max_batch // world_size))


def group_library(settings: Settings, checkpoint: Checkpoint) -> str:
    """What carries the ranks' tensors. Raises InvalidField when a dispatch backend is named that cannot run here."""
    if not isinstance(checkpoint.config, DeepseekConfig):
        return "gloo"
    return DISPATCH.choose(_dispatch_case(settings, checkpoint.config), named=settings.kernels.dispatch).library


def _share(settings: Settings, checkpoint: Checkpoint, rank: int) -> ExpertShare | None:
    """None: a dense model, of which each rank has all."""
    if not isinstance(checkpoint.config, DeepseekConfig):
        return None
    world_size, num_experts = settings.engine.target_ranks, checkpoint.config.moe.num_experts
    case = _dispatch_case(settings, checkpoint.config)
    backend = DISPATCH.choose(case, named=settings.kernels.dispatch)
    experts = experts_of(rank, world_size, num_experts) if world_size > 1 else None
    return ExpertShare(dispatcher=backend.make(case), experts=experts, dispatch=backend.name)


def _dispatch_case(settings: Settings, config: DeepseekConfig) -> DispatchCase:
    kind = settings.engine.device.partition(":")[0]
    return DispatchCase(world_size=settings.engine.target_ranks, num_experts=config.moe.num_experts, device=kind)


async def until_broken(steps: StepThread) -> None:
    """Until a step raised; raises InternalError then."""
    await steps.failed.wait()
    raise InternalError("a step broke the engine: its state is no longer known, a new worker must take over")
