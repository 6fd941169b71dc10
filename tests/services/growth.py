"""Whether a process keeps something of each call: blocks that Python has allocated, and resident memory."""

from __future__ import annotations

import gc
import sys

import psutil

BLOCKS_A_CALL = 0.1  # whoever keeps one object a call keeps a block a call at least
BLOCKS = 600  # what caches that are not full yet, and threads at work, may add
RESIDENT_BYTES = 16 * 2**20  # the allocator's own rounding, and caches that fill; asked of long runs only
LONG = 5000


class Growth:
    """Begin when caches are warm."""

    def __init__(self) -> None:
        gc.collect()
        self._blocks, self._resident = sys.getallocatedblocks(), psutil.Process().memory_info().rss

    def check(self, num_calls: int, what: str) -> None:
        """Raises AssertionError if so many calls have left something behind. Prints what it found (`pytest -rP`)."""
        gc.collect()
        blocks = sys.getallocatedblocks() - self._blocks
        resident = psutil.Process().memory_info().rss - self._resident
        found = f"{what}: {blocks:+d} blocks, {resident / 1024:+.0f} KiB resident over {num_calls} calls"
        print(found)
        assert blocks < BLOCKS + BLOCKS_A_CALL * num_calls, found
        assert num_calls < LONG or resident < RESIDENT_BYTES, found
