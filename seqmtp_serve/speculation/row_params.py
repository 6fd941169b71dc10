"""What selection has to know of each row of a batch, stacked. Rows of different requests and contracts mix freely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import is_not

import torch
from torch import Tensor

from seqmtp_serve.request import Contract, Request, SamplingParams
from seqmtp_serve.speculation.noise import Purpose, as_word, stream_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Ban:
    """Token ids that may not be chosen at absolute positions below `before`."""

    token_ids: tuple[int, ...]
    before: int


def minimum_length_ban(request: Request) -> Ban | None:
    """The ban `min_tokens` stands for: no stop token among the first `min_tokens` output tokens.

    Told by absolute position, it also counts the drafts accepted earlier in the same round. With a grammar there is
    none: that knows itself how far an end can be put off.
    """
    params = request.params
    if params.shaping is not None and params.shaping.grammar:
        return None
    stops = params.stop_token_ids + (() if params.ignore_eos else request.eos_token_ids)
    if params.min_tokens == 0 or not stops:
        return None
    return Ban(token_ids=stops, before=len(request.prompt_ids) + params.min_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowParams:
    """Sampling parameters of N rows. Filters that are off hold their neutral value (top_k 0, top_p 1, min_p 0)."""

    contracts: tuple[Contract, ...]
    bans: tuple[Ban | None, ...]
    is_filtered: tuple[bool, ...]  # top-k, top-p or min-p is on
    temperature_N: Tensor  # float64; 1 where the contract is greedy
    top_k_N: Tensor  # int64
    top_p_N: Tensor  # float64
    min_p_N: Tensor  # float64
    seed_N: Tensor  # int64 words
    choice_N: Tensor  # int64

    @classmethod
    def stack(
        cls,
        rows: Sequence[tuple[SamplingParams, int]],
        bans: Sequence[Ban | None] | None = None,
        device: torch.device | str = "cpu",
    ) -> RowParams:
        """One row per (parameters, choice index)."""
        params = [each for each, _ in rows]
        assert all(each.temperature >= 0.0 and each.top_p > 0.0 for each in params), "unchecked sampling parameters"

        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            contracts=tuple(each.contract for each in params),
            bans=tuple(bans) if bans is not None else (None,) * len(params),
            is_filtered=tuple(each.top_k > 0 or each.top_p < 1.0 or each.min_p > 0.0 for each in params),
            temperature_N=column([each.temperature or 1.0 for each in params], torch.float64),
            top_k_N=column([each.top_k for each in params], torch.int64),
            top_p_N=column([each.top_p for each in params], torch.float64),
            min_p_N=column([each.min_p for each in params], torch.float64),
            seed_N=column([as_word(each.seed) for each in params], torch.int64),
            choice_N=column([choice for _, choice in rows], torch.int64),
        )

    @classmethod
    def of_requests(cls, requests: Sequence[Request], device: torch.device | str = "cpu") -> RowParams:
        """One row per request, with its minimum-length ban."""
        rows = [(request.params, request.choice) for request in requests]
        return cls.stack(rows, [minimum_length_ban(request) for request in requests], device)

    def __len__(self) -> int:
        return len(self.contracts)

    def take(self, rows: Sequence[int]) -> RowParams:
        """These rows, in this order."""
        if list(rows) == list(range(len(self))):
            return self
        index = torch.tensor(rows, dtype=torch.int64, device=self.seed_N.device)
        columns = {each.name: getattr(self, each.name)[index] for each in fields(self) if each.name.endswith("_N")}
        return replace(
            self,
            contracts=tuple(self.contracts[row] for row in rows),
            bans=tuple(self.bans[row] for row in rows),
            is_filtered=tuple(self.is_filtered[row] for row in rows),
            **columns,
        )

    def keys(self, position_N: Tensor, purpose: Purpose) -> Tensor:
        """Stream keys [N] for the tokens at these absolute positions."""
        return stream_keys(self.seed_N, self.choice_N, position_N, purpose)


class RecentRowParams:
    """`RowParams.of_requests`, kept as long as the very same requests come again: from step to step they mostly do."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._requests: tuple[Request, ...] = ()
        self._params = RowParams.of_requests((), device)

    def of(self, requests: Sequence[Request]) -> RowParams:
        """One row per request."""
        if len(requests) != len(self._requests) or any(map(is_not, requests, self._requests)):
            self._requests, self._params = tuple(requests), RowParams.of_requests(requests, self._device)
        return self._params
