"""What the drafts of `v3-tiny` are worth on held-out Python, through the whole system in one process."""

from __future__ import annotations

import asyncio

import pytest

from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.config import EngineConfig, SchedulerConfig
from seqmtp_serve.local import LocalService
from services.detokenizer import Detokenizer
from tests.unit.v3_tiny import MODEL, greedy, prompts

NUM_PROMPTS, NUM_TOKENS, DEPTH = 16, 40, 3


@pytest.mark.covers(54, 93, 95, 157)
async def test_greedy_acceptance_has_not_been_lost_and_costs_no_token() -> None:
    checkpoint = open_checkpoint(MODEL)
    engine = EngineConfig(weights="fp32", max_model_len=512, num_pages=80, max_batch=8)
    async with LocalService.open(
        MODEL, decoder=Detokenizer, engine=engine, scheduler=SchedulerConfig(max_batch=8)
    ) as service:
        plain, drafted = [
            await asyncio.gather(
                *(
                    service.generate(greedy(checkpoint, prompt, NUM_TOKENS, depth=depth))
                    for prompt in prompts(NUM_PROMPTS)
                )
            )
            for depth in (0, DEPTH)
        ]
    for rows, plain_rows in zip(drafted, plain, strict=True):
        assert [token for row in rows for token in row.tokens] == [token for row in plain_rows for token in row.tokens]
    full = [row.accepted for rows in drafted for row in rows if row.drafted == DEPTH]
    by_position = [sum(accepted > position for accepted in full) / len(full) for position in range(DEPTH)]
    assert len(full) > 100
    assert by_position[0] >= 0.65
    assert 1 + sum(by_position) >= 2.0
