"""docs/requirements.md is what the tests say."""

from __future__ import annotations

from pathlib import Path

from tests.requirements_table import covered, table

PAGE = Path(__file__).parents[2] / "docs" / "requirements.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == table(), "run: python -m tests.requirements_table > docs/requirements.md"


def test_marks_are_found() -> None:
    shown = covered()
    assert len(shown[67]) > 1
    assert all("::test_" in name or "::Test" in name for names in shown.values() for name in names)
