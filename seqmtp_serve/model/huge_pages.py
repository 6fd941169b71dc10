"""Ask the kernel to hold the weights in huge pages.

A decode step reads every weight once, so with pages of 4 KiB it misses the TLB once every 4 KiB: a fifth of the time of
its int8 products on a virtual machine. The packed weights belong to the GEMM library, which allocates them itself and
tells nobody where; so this looks for the large private mappings of the process that are wholly in memory. Only those,
because a huge page makes memory resident that was merely reserved (stacks, arenas, caches).

Linux with transparent huge pages set to `madvise` or `always`; elsewhere nothing happens. No value changes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

HUGE = 2 << 20
_MADV_COLLAPSE = 25  # Linux 6.1: now, and not when the kernel comes round; `mmap` has no name for it yet
_RESIDENT_SHARE = 0.95
_HEAD = re.compile(r"(?P<start>[0-9a-f]+)-(?P<stop>[0-9a-f]+) rw-p \S+ 00:00 0\s*(?P<name>.*)")


def use_huge_pages(smaps: Path = Path("/proc/self/smaps")) -> int:
    """Collapse what is large and resident by now. Returns the bytes agreed to. Call it once, after loading."""
    if not (hasattr(mmap, "MADV_HUGEPAGE") and os.access(smaps, os.R_OK)):
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    num_bytes = 0
    for start, stop in resident_mappings(smaps.read_text()):
        if libc.madvise(start, stop - start, mmap.MADV_HUGEPAGE) == 0:
            libc.madvise(start, stop - start, _MADV_COLLAPSE)  # an older kernel refuses, and gets there by itself
            num_bytes += stop - start
    return num_bytes


def resident_mappings(smaps: str) -> Iterator[tuple[int, int]]:
    """Addresses of private anonymous mappings that are nearly all in memory, cut to whole huge pages."""
    start = stop = 0
    for line in smaps.splitlines():
        if head := _HEAD.fullmatch(line):
            is_ours = head["name"] in ("", "[heap]")
            start, stop = (int(head["start"], 16), int(head["stop"], 16)) if is_ours else (0, 0)
        elif line[:1].isdigit() or line[:1] in "abcdef":
            start = stop = 0
        elif line.startswith("Rss:") and int(line.split()[1]) << 10 >= _RESIDENT_SHARE * (stop - start):
            first, last = -(-start // HUGE) * HUGE, stop // HUGE * HUGE
            if first < last:
                yield first, last
