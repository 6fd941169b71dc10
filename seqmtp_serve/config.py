"""The configuration tree: frozen, built once at the edge, passed down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How a target or proposer engine computes and what it may hold.

    `numerics` "invariant": a row's bits depend on its own prefix only, never on batch, chunking or depth; "fast" drops
    that promise. `weights` is the storage of the linear layers. A page holds `page_size` positions of every layer;
    `num_pages` bounds all sequences together. `max_batch` bounds the sequences of one step, `max_depth` the drafts of
    one round, `draft_top_n` the support of a sparse draft distribution.
    """

    numerics: Literal["invariant", "fast"] = "invariant"
    weights: Literal["int8", "fp32"] = "int8"
    page_size: int = 64
    num_pages: int = 512
    max_model_len: int = 2048
    max_batch: int = 16
    max_depth: int = 3
    num_threads: int = 1
    draft_top_n: int = 16

    @property
    def max_pages_per_sequence(self) -> int:
        """Pages of a sequence that fills the context."""
        return -(-self.max_model_len // self.page_size)
