"""The target process without a model: see `seqmtp_serve/simulated.py`. Its name, numerics and log say what it is."""

from __future__ import annotations

import logging

from seqmtp_serve.errors import InvalidField
from seqmtp_serve.ports import TargetInfo
from seqmtp_serve.simulated import MODEL, SimulatedCosts, SimulatedEngine
from services.core_config import engine_config
from services.settings import Settings
from services.target.colocated import ColocatedProposer

VOCAB_SIZE = 2048  # the first tokens of a tokenizer: short pieces

log = logging.getLogger(__name__)


class SimulatedProposer(ColocatedProposer):
    """Always ready: the engine makes its drafts up itself, and declares what they cost."""

    def __init__(self) -> None:
        super().__init__(None)

    @property
    def ready(self) -> bool:
        """Nothing is missing."""
        return True


def simulated_engine(settings: Settings, group_id: str) -> SimulatedEngine:
    """The group's engine. Raises InvalidField for several ranks."""
    costs = settings.simulated
    assert costs is not None
    if settings.engine.target_ranks != 1:
        raise InvalidField("a simulated target is one process", param="engine.target_ranks")
    config = engine_config(settings)
    log.warning("%s is SIMULATED: it computes nothing, its text means nothing", group_id)
    info = TargetInfo(
        group_id=group_id,
        model=MODEL,
        max_model_len=config.max_model_len,
        vocab_size=VOCAB_SIZE,
        page_size=config.page_size,
        num_pages=config.num_pages,
        max_batch=config.max_batch,
        max_depth=config.max_depth,
        numerics=MODEL,
        manifest_fingerprint="",
    )
    declared = SimulatedCosts(
        step_ms=costs.step_ms, row_ms=costs.row_ms, draft_ms=costs.draft_ms, acceptance=costs.acceptance
    )
    return SimulatedEngine(info, declared)
