"""Which mappings are asked to become huge pages: large, private, anonymous and resident ones only."""

from __future__ import annotations

from pathlib import Path

import torch

from seqmtp_serve.model.huge_pages import HUGE, resident_mappings, use_huge_pages

MIB = 1 << 20


def mapping(start: int, size: int, rss: int, *, flags: str = "rw-p", device: str = "00:00 0", name: str = "") -> str:
    head = f"{start:x}-{start + size:x} {flags} 00000000 {device} {name}".rstrip()
    return f"{head}\nSize: {size >> 10} kB\nRss: {rss >> 10} kB\nPss: {rss >> 10} kB\nVmFlags: rd wr\n"


def test_only_large_resident_anonymous_memory_is_taken() -> None:
    base = 64 * HUGE
    smaps = "".join(
        [
            mapping(base, 8 * MIB, 8 * MIB, name="[heap]"),
            mapping(base + 16 * MIB + 4096, 6 * MIB, 6 * MIB),  # not aligned: two whole huge pages inside
            mapping(base + 32 * MIB, 8 * MIB, MIB),  # a stack: reserved, hardly used
            mapping(base + 48 * MIB, MIB, MIB),  # smaller than one huge page
            mapping(base + 64 * MIB, 8 * MIB, 8 * MIB, flags="r--p"),
            mapping(base + 80 * MIB, 8 * MIB, 8 * MIB, flags="rw-s"),
            mapping(base + 96 * MIB, 8 * MIB, 8 * MIB, device="fe:01 77", name="/weights"),
            mapping(base + 112 * MIB, 8 * MIB, 8 * MIB, name="[stack]"),
        ]
    )
    assert list(resident_mappings(smaps)) == [
        (base, base + 8 * MIB),
        (base + 18 * MIB, base + 22 * MIB),
    ]


def test_values_stay() -> None:
    weight = torch.arange(4 * HUGE, dtype=torch.int32)
    use_huge_pages()
    assert torch.equal(weight, torch.arange(4 * HUGE, dtype=torch.int32))


def test_a_system_without_it_is_left_alone(tmp_path: Path) -> None:
    assert use_huge_pages(tmp_path / "smaps") == 0
