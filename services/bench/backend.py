"""What a bench needs of a system under test: generate one reply at a depth, and read the ledger's counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

Depth = int | Literal["auto"]  # drafts a round at most, or what the depth controller chooses
SEED = 7  # of replies that are sampled: the same text at any depth


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One reply. `first_token_s` counts from the request to the first committed row, `total_s` to the last."""

    text: str
    num_tokens: int
    first_token_s: float
    total_s: float = 0.0
    num_prompt_tokens: int = 0
    num_cached: int = 0  # prompt tokens that were not computed


class Backend(Protocol):
    """The system in this process (`local_backend.py`) or behind a URL (`url_backend.py`)."""

    @property
    def model(self) -> str: ...

    @property
    def numerics(self) -> str: ...

    @property
    def is_local(self) -> bool:
        """Whether all of it computes in this process."""
        ...

    async def generate(self, prompt: str, *, depth: Depth, max_tokens: int, temperature: float = 0.0) -> Generation:
        """A reply to a first user turn, greedy or sampled from `SEED`. Raises SeqMTPError."""
        ...

    async def counters(self) -> Mapping[str, float]:
        """The ledger's counters (names: `seqmtp_serve/frontier/ledger.py`); they only rise."""
        ...
