"""Pages: who holds which part of a cache. One pool per owner; a lease is one sequence's claim on it.

Target keys/values and MTP keys/values live in different pools, and a lease names its pool and generation, so pages of
one can never be read as pages of the other, nor through a lease that was closed. Provisional rows lie in the same
pages above a sequence's canonical length: rolling back is moving that length back, and needs no page operation.

A new lease starts in the middle of the largest hole and grows to the right, so a sequence's pages are usually
consecutive, and attention then reads them in place instead of gathering them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from seqmtp_serve.errors import InternalError, Overloaded


class Owner(StrEnum):
    """Whose rows a pool holds."""

    TARGET = "target"
    MTP = "mtp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A claim on pages of one pool. `generation` is never used twice."""

    owner: Owner
    generation: int


class PagePool:
    """Hands out page numbers `0 .. num_pages - 1`. Single-threaded."""

    def __init__(self, owner: Owner, num_pages: int, page_size: int) -> None:
        self.owner, self.num_pages, self.page_size = owner, num_pages, page_size
        self._is_free = [True] * num_pages
        self._held: dict[Lease, list[int]] = {}
        self._generation = 0

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return self.num_pages - sum(len(pages) for pages in self._held.values())

    def open(self) -> Lease:
        """A new lease, without pages."""
        self._generation += 1
        lease = Lease(owner=self.owner, generation=self._generation)
        self._held[lease] = []
        return lease

    def grow(self, lease: Lease, num_slots: int) -> None:
        """Make room for `num_slots` slots in all. Raises Overloaded when pages run out, and then changes nothing."""
        held = self.pages(lease)
        wanted = -(-num_slots // self.page_size) - len(held)
        if wanted > self.num_free:
            raise Overloaded(f"{wanted} {self.owner} pages wanted, {self.num_free} free; release sequences first")
        for _ in range(wanted):
            page = held[-1] + 1 if held else self.num_pages
            if page >= self.num_pages or not self._is_free[page]:
                page = self._start_of_growth(wanted)
            self._is_free[page] = False
            held.append(page)

    def pages(self, lease: Lease) -> list[int]:
        """The pages of a lease in slot order. Raises InternalError for a lease that is closed or of another pool."""
        held = self._held.get(lease)
        if held is None:
            raise InternalError(f"{lease} is not open in the {self.owner} pool")
        return held

    def close(self, lease: Lease) -> None:
        """Give the pages back. The lease is void from now on."""
        for page in self.pages(lease):
            self._is_free[page] = True
        del self._held[lease]

    def slots(self, lease: Lease, start: int, stop: int) -> Tensor:
        """Cache rows of the lease's slots `start .. stop - 1`, int64."""
        slot = torch.arange(start, stop)
        pages = torch.tensor(self.pages(lease))
        return pages[slot // self.page_size] * self.page_size + slot % self.page_size

    def check(self) -> None:
        """Assert that every page has exactly one holder or is free."""
        held = [page for pages in self._held.values() for page in pages]
        assert len(held) == len(set(held)), "a page is held twice"
        assert all(not self._is_free[page] for page in held), "a held page is marked free"
        assert sum(self._is_free) + len(held) == self.num_pages, "a page is lost"

    def _start_of_growth(self, wanted: int) -> int:
        """Where the largest hole should be entered: at its start if it begins the pool, else as far from both ends as
        `wanted` pages allow, so that the neighbour on the left can still grow."""
        best_start = best_len = start = 0
        for page in range(self.num_pages + 1):
            if page == self.num_pages or not self._is_free[page]:
                if page - start > best_len:
                    best_start, best_len = start, page - start
                start = page + 1
        return best_start if best_start == 0 else best_start + max(0, best_len - wanted) // 2
