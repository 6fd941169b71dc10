"""The tensors that pages are pages of.

Shapes: L layers, S slots of the pool (pages x page size), E values of a cached row (keys and values, or a latent),
d hidden.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable

import torch
from torch import Tensor

from seqmtp_serve.config import EngineConfig
from seqmtp_serve.engine.pages import Lease, Owner, PagePool
from seqmtp_serve.model.device import CPU
from seqmtp_serve.model.family import ModelConfig


class PagedCache:
    """Cached rows `[L, S, E]` of one owner and, for a target, the hidden row `[S, d]` of each slot.

    An MTP owner has one layer for each depth. Its page table serves them all: see the slot rule of `proposer.py`.

    All rows are float32 and finite at all times: attention multiplies masked slots by zero. On a CPU memory is touched,
    and so resident, only once a page was used. The page tables are the host's.
    """

    def __init__(
        self,
        owner: Owner,
        config: EngineConfig,
        model: ModelConfig,
        num_layers: int,
        device: torch.device = CPU,
    ) -> None:
        num_kept = config.prefix_cache_pages if owner is Owner.TARGET else 0
        self.pool = PagePool(owner, config.num_pages, config.page_size, num_kept)
        self._suspect: set[int] = set()  # shared with a sequence whose rows may hold NaN
        num_slots = config.num_pages * config.page_size
        self.kv_LSE = untouched_zeros(num_layers, num_slots, model.cache_row_size, device=device)
        num_hidden = num_slots if owner is Owner.TARGET else 0
        self.hidden_Sd = untouched_zeros(num_hidden, model.hidden_size, device=device)

    @property
    def num_rows_in_use(self) -> int:
        """Rows of pages that somebody holds."""
        return (self.pool.num_pages - self.pool.num_free) * self.pool.page_size

    @property
    def row_bytes(self) -> int:
        """One token's keys and values, all layers."""
        num_layers, _, width = self.kv_LSE.shape
        return num_layers * width * self.kv_LSE.element_size()

    @property
    def hidden_row_bytes(self) -> int:
        """One token's hidden row."""
        return self.hidden_Sd.shape[1] * self.hidden_Sd.element_size()

    def scrub(self, lease: Lease) -> None:
        """Zero the lease's pages, which may hold NaN, before others get them; shared ones when all holders left."""
        own = self.pool.exclusive(lease)
        self._suspect |= set(self.pool.pages(lease)) - set(own)
        self.pool.withdraw(lease)
        self._zero(own)

    def close(self, lease: Lease) -> None:
        """Give the lease's pages back."""
        left = self._suspect.intersection(self.pool.close(lease))
        self._suspect -= left
        self._zero(left)

    def hidden(self, lease: Lease, start: int, stop: int) -> Tensor:
        """A copy of the hidden rows of slots `start .. stop - 1`: `[n, d]`."""
        return self.hidden_Sd.index_select(0, self.pool.slots(lease, start, stop).to(self.hidden_Sd.device))

    def _zero(self, pages: Iterable[int]) -> None:
        size = self.pool.page_size
        for page in pages:
            self.kv_LSE[:, page * size : (page + 1) * size] = 0.0
            self.hidden_Sd[page * size : (page + 1) * size] = 0.0


def untouched_zeros(*shape: int, device: torch.device = CPU) -> Tensor:
    """float32 zeros; on a CPU they occupy no memory before they are written (`torch.zeros` writes them all)."""
    num_elements = math.prod(shape)
    if num_elements == 0 or device.type != "cpu":
        return torch.zeros(shape, device=device)
    return torch.frombuffer(mmap.mmap(-1, num_elements * torch.float32.itemsize), dtype=torch.float32).view(shape)
