"""What every rank of a target group is made of, the only one of a group of one as well: checkpoint, link, engine."""

from __future__ import annotations

from dataclasses import replace

import torch

from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.config import EngineConfig
from seqmtp_serve.engine.target import TargetEngine
from seqmtp_serve.errors import InternalError
from seqmtp_serve.model.all_to_all import AllToAllDispatcher
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


def open_target(settings: Settings) -> Checkpoint:
    """The checkpoint, its headers read. Raises TargetIncomplete."""
    torch.set_num_threads(settings.engine.num_threads)
    return open_checkpoint(settings.model.path, settings.model.mtp)


def load(settings: Settings, checkpoint: Checkpoint, link: Link, group_id: str, rank: int = 0) -> TargetEngine:
    """Rank `rank`'s engine: its share of the pages and, of a model with experts, of the experts.

    With more than one rank the process group must be there already. Raises TargetIncomplete.
    """
    share = _share(checkpoint, rank, settings.engine.target_ranks)
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
    give_back()
    use_huge_pages()
    return engine


def rank_config(config: EngineConfig, world_size: int) -> EngineConfig:
    """One rank's part of what the group may hold, rounded up."""
    return replace(config, num_pages=-(-config.num_pages // world_size), max_batch=-(-config.max_batch // world_size))


def _share(checkpoint: Checkpoint, rank: int, world_size: int) -> ExpertShare | None:
    """None: a dense model, of which each rank has all, or a group of one."""
    if world_size == 1 or not isinstance(checkpoint.config, DeepseekConfig):
        return None
    num_experts = checkpoint.config.moe.num_experts
    return ExpertShare(dispatcher=AllToAllDispatcher(num_experts), experts=experts_of(rank, world_size, num_experts))


async def until_broken(steps: StepThread) -> None:
    """Until a step raised; raises InternalError then."""
    await steps.failed.wait()
    raise InternalError("a step broke the engine: its state is no longer known, a new worker must take over")
