"""The system in this process: a round driver, spoken to without a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from time import perf_counter

from seqmtp_serve.request import Request, SamplingParams
from seqmtp_serve.rounds import RoundDriver
from services.bench.backend import Generation


class DriverBackend:
    """`encode` turns a first user turn into prompt ids, `decode` tokens into text. Use it from the driver's loop."""

    def __init__(
        self,
        driver: RoundDriver,
        *,
        model: str,
        numerics: str,
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[Sequence[int]], str],
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.model, self.numerics = model, numerics
        self._driver, self._encode, self._decode, self._eos = driver, encode, decode, eos_token_ids
        self._ids = count(1)

    async def generate(self, prompt: str, *, depth: int, max_tokens: int) -> Generation:
        request = Request(
            request_id=f"bench-{next(self._ids)}",
            prompt_ids=tuple(self._encode(prompt)),
            params=SamplingParams(temperature=0.0, max_tokens=max_tokens, max_depth=depth),
            eos_token_ids=self._eos,
        )
        started, first_s, tokens = perf_counter(), 0.0, list[int]()
        async for row in await self._driver.submit(request):
            first_s = first_s or perf_counter() - started
            tokens += row.tokens
        return Generation(text=self._decode(tokens), num_tokens=len(tokens), first_token_s=first_s)

    async def counters(self) -> Mapping[str, float]:
        return self._driver.ledger.counters()
