"""The whole system in this process (`seqmtp_serve/local.py`), for a bench.

One thread computes, so the ledger's C_mtp hides nothing; over the network part of it overlaps the commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.config import EngineConfig, SchedulerConfig
from seqmtp_serve.errors import InvalidField
from seqmtp_serve.local import LocalService, build_target
from services.bench.driver_backend import DriverBackend
from services.detokenizer import Detokenizer
from services.gateway.text_model import open_text_model


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSystem:
    """What to build. `speculates`: the MTP part must pass its gate."""

    model: str
    mtp: str | None
    speculates: bool
    engine: EngineConfig


def open_encoder(model: str) -> tuple[Tokenizer, Callable[[str], list[int]]]:
    """The model's tokenizer, and what makes a first user turn of a prompt. Raises InvalidField without a template."""
    text = open_text_model(model)
    tokenizer, template = text.tokenizer, text.template
    if template is None:
        raise InvalidField(f"{model} has no chat template to put prompts into", param="model")

    def encode(prompt: str) -> list[int]:
        turn = template.render([{"role": "user", "content": prompt}])
        ids: list[int] = tokenizer.encode(turn, add_special_tokens=False).ids
        return ids

    return tokenizer, encode


@asynccontextmanager
async def open_local(system: LocalSystem) -> AsyncIterator[DriverBackend]:
    """Load both parts and start the driver.

    Raises ModelNotFound, TargetIncomplete, MtpIncomplete, or InvalidField for a model without a chat template.
    """
    checkpoint = open_checkpoint(system.model, system.mtp)
    if system.speculates:
        checkpoint.mtp_tensors()  # raises what `build_target` would pass over
    tokenizer, encode = open_encoder(system.model)
    engine = await asyncio.to_thread(build_target, checkpoint, system.engine)
    static = SchedulerConfig(max_batch=system.engine.max_batch, max_depth=system.engine.max_depth)
    auto = replace(static, depth_policy="auto", max_copied=system.engine.max_copied)
    # Both drive one engine, but never at the same time: a bench measures one depth after the other.
    async with (
        LocalService.running(engine, lambda one: Detokenizer(tokenizer, one.prompt_ids), scheduler=static) as service,
        LocalService.running(engine, lambda one: Detokenizer(tokenizer, one.prompt_ids), scheduler=auto) as controlled,
    ):
        for each in (service, controlled):
            while not each.driver.status().target_ready:
                await asyncio.sleep(0.01)
        yield DriverBackend(
            service.driver,
            auto=controlled.driver,
            model=checkpoint.name,
            numerics=system.engine.numerics,
            encode=encode,
            decode=tokenizer.decode,
            eos_token_ids=checkpoint.eos_token_ids,
        )
