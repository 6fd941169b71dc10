"""The core's frozen configurations, from the settings tree. The words differ; this is the one place that knows both."""

from __future__ import annotations

from dataclasses import replace

from seqmtp_serve.config import EngineConfig, Kernels, SchedulerConfig
from services.settings import Settings


def engine_config(settings: Settings) -> EngineConfig:
    """What a target or proposer engine is built with."""
    engine, speculation = settings.engine, settings.speculation
    pages_per_sequence = -(-engine.max_model_len // engine.page_size)
    return EngineConfig(
        numerics=engine.numerics,
        weights=engine.weights,
        device=engine.device,
        page_size=engine.page_size,
        num_pages=engine.num_pages or engine.max_num_seqs * pages_per_sequence,
        prefix_cache_pages=engine.prefix_cache_pages,
        max_model_len=engine.max_model_len,
        max_batch=engine.max_num_seqs,
        max_depth=speculation.num_speculative_tokens,
        num_threads=engine.num_threads,
        draft_top_n=speculation.draft_top_n,
        hidden_window=speculation.hidden_window,
        hidden_dtype=speculation.hidden_dtype,
        prompt_lookup=speculation.prompt_lookup,
        max_copied=speculation.max_copied_tokens,
        kernels=Kernels(**settings.kernels.model_dump()),
    )


def proposer_config(settings: Settings) -> EngineConfig:
    """The same for a proposer, whose module may lie on a device of its own."""
    return replace(engine_config(settings), device=settings.speculation.device or settings.engine.device)


def scheduler_config(settings: Settings) -> SchedulerConfig:
    """What a coordinator's driver is built with. Raises InvalidField for numbers that do not fit together."""
    scheduler = settings.scheduler
    return SchedulerConfig(
        max_batch=settings.engine.max_num_seqs,
        max_waiting=scheduler.max_waiting,
        max_waiting_tokens=scheduler.max_waiting_tokens,
        step_tokens=scheduler.max_num_batched_tokens,
        prefill_chunk=scheduler.prefill_chunk,
        cohorts=scheduler.cohorts,
        max_depth=settings.speculation.num_speculative_tokens,
        depth_policy=settings.speculation.depth_policy,
        max_copied=settings.speculation.max_copied_tokens if settings.speculation.depth_policy == "auto" else 0,
        step_deadline_ms=scheduler.step_deadline_ms,
        lease_s=scheduler.lease_s,
    )
