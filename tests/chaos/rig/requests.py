"""The texts that clients ask for, and what plain decoding gives for each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from seqmtp_serve.config import EngineConfig, SchedulerConfig
from seqmtp_serve.local import LocalService
from seqmtp_serve.request import Request, SamplingParams

SEEDED_TEMPERATURE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One request: its HTTP body, and its tokens without speculation, network or store."""

    body: dict[str, Any]
    reference: tuple[int, ...]


async def draw_wishes(
    model: Path, number: int, *, max_tokens: tuple[int, int], rng: Random, max_len: int
) -> list[Wish]:
    """Half greedy, half seeded, prompts of 3 to 60 tokens, decoded one by one at depth 0."""
    requests = []
    for index in range(number):
        seeded = index % 2 == 1
        requests.append(
            Request(
                request_id=f"reference-{index}",
                prompt_ids=tuple(rng.randrange(2, 64) for _ in range(rng.randint(3, 60))),
                params=SamplingParams(
                    temperature=SEEDED_TEMPERATURE if seeded else 0.0,
                    seed=rng.randrange(2**32) if seeded else 0,
                    seeded=seeded,
                    max_tokens=rng.randint(*max_tokens),
                    ignore_eos=True,
                    max_depth=0,
                ),
            )
        )
    engine = EngineConfig(weights="fp32", max_model_len=max_len, num_pages=2 * max_len // 64, max_batch=1)
    wishes = []
    async with LocalService.open(
        str(model), decoder=lambda *_: lambda _: "", engine=engine, scheduler=SchedulerConfig(max_batch=1)
    ) as service:
        for request in requests:
            rows = await service.generate(request)
            reference = tuple(token for row in rows for token in row.tokens)
            wishes.append(Wish(body=_body(request), reference=reference))
    return wishes


def _body(request: Request) -> dict[str, Any]:
    params = request.params
    body: dict[str, Any] = {
        "prompt": list(request.prompt_ids),
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "ignore_eos": True,
        "stream": True,
        "speculation": {"trace": True},
    }
    return body | ({"seed": params.seed} if params.seeded else {})
