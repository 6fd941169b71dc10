"""The shipped chat model and its MTP module: the text at any depth and batch is the text of plain decoding.

Prompts are Spec-Bench's first turns (hemingkx/Spec-Bench, Apache-2.0), cut short to keep prefill small. The file is not
part of this repository: name it by SEQMTP_SPEC_BENCH, or put it at ../shared/data/spec_bench.jsonl.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.config import SchedulerConfig
from seqmtp_serve.local import LocalService
from seqmtp_serve.request import CommittedRow, Request, SamplingParams
from services.bench.prompts import read_prompts
from services.detokenizer import Detokenizer
from services.gateway.chat_template import ChatTemplate

ROOT = Path(__file__).parents[2]
SPEC_BENCH = Path(os.environ.get("SEQMTP_SPEC_BENCH", ROOT.parent / "shared" / "data" / "spec_bench.jsonl"))
NUM_PROMPTS, MAX_CHARS, MAX_TOKENS = 50, 600, 24
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not SPEC_BENCH.exists(), reason=f"needs Spec-Bench's prompts at {SPEC_BENCH}"),
]


MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """The service, and what turns a user turn into prompt ids."""

    service: LocalService
    encode: Callable[[str], list[int]]
    eos_token_ids: tuple[int, ...]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system() -> AsyncIterator[System]:
    checkpoint = open_checkpoint(MODEL)
    checkpoint.mtp_tensors()  # raises what serving would pass over
    tokenizer, template = checkpoint.tokenizer(), ChatTemplate(checkpoint.chat_template)

    def encode(prompt: str) -> list[int]:
        text = template.render([{"role": "user", "content": prompt}])
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    async with LocalService.open(MODEL, decoder=Detokenizer, scheduler=SchedulerConfig(max_batch=8)) as service:
        yield System(service=service, encode=encode, eos_token_ids=checkpoint.eos_token_ids)


async def texts(
    system: System, prompts: Sequence[str], *, depth: int, batch: int, temperature: float = 0.0
) -> tuple[list[tuple[int, ...]], list[CommittedRow]]:
    """Tokens of each prompt's reply, at most `batch` at a time, and all rows."""
    room = asyncio.Semaphore(batch)

    async def reply(index: int, prompt: str) -> list[CommittedRow]:
        params = SamplingParams(
            temperature=temperature, seed=1000 + index, seeded=True, max_tokens=MAX_TOKENS, max_depth=depth
        )
        request = Request(
            request_id=f"t{temperature}-d{depth}-b{batch}-{index}",
            prompt_ids=tuple(system.encode(prompt)),
            params=params,
            eos_token_ids=system.eos_token_ids,
        )
        async with room:
            return await system.service.generate(request)

    replies = await asyncio.gather(*(reply(index, prompt) for index, prompt in enumerate(prompts)))
    rows = [row for each in replies for row in each]
    return [tuple(token for row in each for token in row.tokens) for each in replies], rows


@pytest.mark.covers(72, 157)
async def test_greedy_text_is_the_same_at_every_depth_and_batch(system: System) -> None:
    prompts = [prompt[:MAX_CHARS] for prompt in read_prompts(SPEC_BENCH, NUM_PROMPTS)]
    assert len(prompts) == NUM_PROMPTS
    plain, rows = await texts(system, prompts, depth=0, batch=1)
    assert sum(row.drafted for row in rows) == 0
    for depth, batch in ((0, 8), (1, 1), (1, 4), (2, 2), (2, 8), (3, 1), (3, 8)):
        spoken, rows = await texts(system, prompts, depth=depth, batch=batch)
        assert spoken == plain, f"depth {depth}, batch {batch}"
        assert depth == 0 or sum(row.accepted for row in rows) > 0


async def test_seeded_text_is_the_same_at_every_depth(system: System) -> None:
    prompts = [prompt[:MAX_CHARS] for prompt in read_prompts(SPEC_BENCH, 12)]
    plain, _ = await texts(system, prompts, depth=0, batch=4, temperature=0.8)
    greedy, _ = await texts(system, prompts, depth=0, batch=4)
    assert plain != greedy
    for depth in (1, 2, 3):
        spoken, rows = await texts(system, prompts, depth=depth, batch=4, temperature=0.8)
        assert spoken == plain, f"depth {depth}"
        assert sum(row.accepted for row in rows) > 0
