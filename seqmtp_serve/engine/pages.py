"""Pages: who holds which part of a cache. One pool per owner; a lease is one sequence's claim on it.

Target keys/values and MTP keys/values live in different pools, and a lease names its pool and generation, so pages of
one can never be read as pages of the other, nor through a lease that was closed. Provisional rows lie in the same
pages above a sequence's canonical length: rolling back is moving that length back, and needs no page operation.

A full page of canonical rows can be published under the key of the text up to its end (`prefix.py`). Sequences that
start with the same text then hold the same page; nobody writes to it again. When its last holder leaves, it is kept, up
to `num_kept` such pages, and goes the moment its place is wanted, the one longest unused first (vLLM,
`vllm/v1/core/block_pool.py`, keeps its pages the same way).

A new lease starts in the middle of the largest hole and grows to the right, so a sequence's pages are usually
consecutive, and attention then reads them in place instead of gathering them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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

    def __init__(self, owner: Owner, num_pages: int, page_size: int, num_kept: int = 0) -> None:
        self.owner, self.num_pages, self.page_size = owner, num_pages, page_size
        self._num_kept = num_kept
        self._is_free = [True] * num_pages  # neither held nor kept
        self._held: dict[Lease, list[int]] = {}
        self._num_holders: Counter[int] = Counter()
        self._published: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._kept: dict[int, None] = {}  # published pages without a holder, the longest unused first
        self._withdrawn: set[int] = set()  # may still have several holders
        self._generation = 0

    @property
    def num_free(self) -> int:
        """Pages nobody holds: free ones, and kept ones that would make room."""
        return self.num_pages - len(self._num_holders)

    @property
    def num_shared(self) -> int:
        """Pages that are published, held or kept."""
        return len(self._published)

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
        self._evict(wanted - sum(self._is_free))
        for _ in range(wanted):
            page = held[-1] + 1 if held else self.num_pages
            if page >= self.num_pages or not self._is_free[page]:
                page = self._start_of_growth(wanted)
            self._is_free[page] = False
            self._num_holders[page] = 1
            held.append(page)

    def share(self, lease: Lease, keys: Sequence[bytes]) -> int:
        """Give a lease without pages the published ones under the first of `keys`, up to the first that is missing."""
        held = self.pages(lease)
        assert not held, "shared pages come first"
        for key in keys:
            page = self._published.get(key)
            if page is None:
                break
            self._kept.pop(page, None)
            self._num_holders[page] += 1
            held.append(page)
        return len(held)

    def publish(self, lease: Lease, index: int, key: bytes) -> None:
        """Let others share the lease's page `index`, whose rows are all canonical. A key that is taken stays."""
        page = self.pages(lease)[index]
        if self._num_kept and key not in self._published and page not in self._key_of:
            self._published[key], self._key_of[page] = page, key

    def withdraw(self, lease: Lease) -> None:
        """Nobody may come to share the lease's pages any more."""
        for page in self.pages(lease):
            self._unpublish(page)
        self._withdrawn.update(self.pages(lease))

    def pages(self, lease: Lease) -> list[int]:
        """The pages of a lease in slot order. Raises InternalError for a lease that is closed or of another pool."""
        held = self._held.get(lease)
        if held is None:
            raise InternalError(f"{lease} is not open in the {self.owner} pool")
        return held

    def exclusive(self, lease: Lease) -> list[int]:
        """Those of the lease's pages that no other lease holds."""
        return [page for page in self.pages(lease) if self._num_holders[page] == 1]

    def close(self, lease: Lease) -> list[int]:
        """Give the pages back; returns those that nobody holds now. The lease is void from now on."""
        left = self.exclusive(lease)
        for page in reversed(self.pages(lease)):  # the end of a text is of use to fewer than its start: it goes first
            self._num_holders[page] -= 1
            if not self._num_holders[page]:
                del self._num_holders[page]
                self._withdrawn.discard(page)
                if page in self._key_of:
                    self._kept[page] = None
                else:
                    self._is_free[page] = True
        del self._held[lease]
        self._evict(len(self._kept) - self._num_kept)
        return left

    def slots(self, lease: Lease, start: int, stop: int) -> Tensor:
        """Cache rows of the lease's slots `start .. stop - 1`, int64."""
        slot = torch.arange(start, stop)
        pages = torch.tensor(self.pages(lease))
        return pages[slot // self.page_size] * self.page_size + slot % self.page_size

    def check(self) -> None:
        """Assert that every page is held, kept or free, and that only published pages have several holders."""
        held = Counter(page for pages in self._held.values() for page in pages)
        assert held == self._num_holders, "the holders are miscounted"
        shared = self._key_of.keys() | self._withdrawn
        assert all(count == 1 or page in shared for page, count in held.items()), "a private page is held twice"
        assert all(not self._is_free[page] for page in [*held, *self._kept]), "a page in use is marked free"
        assert not self._kept.keys() & held.keys(), "a held page is up for eviction"
        assert sum(self._is_free) + len(held) + len(self._kept) == self.num_pages, "a page is lost"
        assert {page: key for key, page in self._published.items()} == self._key_of, "a key names two pages"
        assert len(self._kept) <= self._num_kept

    def _evict(self, num_pages: int) -> None:
        """Free kept pages, at most as many as there are."""
        for page in list(self._kept)[: max(0, num_pages)]:
            self._unpublish(page)

    def _unpublish(self, page: int) -> None:
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._published[key]
        if page in self._kept:
            del self._kept[page]
            self._is_free[page] = True

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
