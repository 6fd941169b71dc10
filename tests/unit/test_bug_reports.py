"""docs/bugs.md names tests that exist, and every report has a test."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_report_names_tests_that_exist() -> None:
    sources = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    existing = set(re.findall(r"def (test_\w+)", sources))
    rows = [line for line in (ROOT / "docs/bugs.md").read_text().splitlines() if re.match(r"\| [\[(v]", line)]
    assert len(rows) > 35
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, row
        assert set(named) <= existing, set(named) - existing
