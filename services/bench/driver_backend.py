"""The system in this process: a round driver, spoken to without a network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from time import perf_counter
from typing import Any

from seqmtp_serve.errors import InvalidField
from seqmtp_serve.request import Request, SamplingParams
from seqmtp_serve.rounds import RoundDriver
from services.bench.backend import SEED, Depth, Generation


class DriverBackend:
    """`encode` turns a first user turn into prompt ids, `decode` tokens into text. Use it from the driver's loop.

    `auto` is a driver of the same target whose depth is controlled; without it there is no such depth.
    """

    def __init__(
        self,
        driver: RoundDriver,
        *,
        model: str,
        numerics: str,
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[Sequence[int]], str],
        eos_token_ids: tuple[int, ...],
        auto: RoundDriver | None = None,
    ) -> None:
        self.model, self.numerics, self.is_local = model, numerics, True
        self._driver, self._auto = driver, auto
        self._encode, self._decode, self._eos = encode, decode, eos_token_ids
        self._ids = count(1)

    async def generate(self, prompt: str, *, depth: Depth, max_tokens: int, temperature: float = 0.0) -> Generation:
        driver, max_depth = self._driver, depth
        if max_depth == "auto":
            if self._auto is None:
                raise InvalidField("no depth controller is measured here", param="depths")
            driver, max_depth = self._auto, self._auto.config.max_depth
        request = Request(
            request_id=f"bench-{next(self._ids)}",
            prompt_ids=tuple(self._encode(prompt)),
            params=SamplingParams(
                temperature=temperature,
                seed=SEED,
                seeded=temperature > 0,
                max_tokens=max_tokens,
                max_depth=max_depth,
            ),
            eos_token_ids=self._eos,
        )
        started, first_s, cached, tokens = perf_counter(), 0.0, 0, list[int]()
        async for row in await driver.submit(request):
            first_s = first_s or perf_counter() - started
            cached += row.cached
            tokens += row.tokens
        return Generation(
            text=self._decode(tokens),
            num_tokens=len(tokens),
            first_token_s=first_s,
            total_s=perf_counter() - started,
            num_prompt_tokens=len(request.prompt_ids),
            num_cached=cached,
        )

    async def counters(self) -> Mapping[str, float]:
        totals = Counter(self._driver.ledger.counters())
        if self._auto is not None:
            totals.update(self._auto.ledger.counters())
        return totals

    @property
    def depth_ledger(self) -> Sequence[Mapping[str, Any]]:
        """The controller's latest decisions, each with what it was made from."""
        return () if self._auto is None else tuple(self._auto.depth.ledger)
