"""The documentation holds together: every page is in the navigation, and every link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "loadtest/README.md"])
LINK = re.compile(r"\]\((?!https?://|#)([^)\s#]+)(?:#([^)\s]+))?\)")
CODE_PATH = re.compile(
    r"`((?:seqmtp_serve|services|tests|deploy|k8s|loadtest|docs|frontier|model|engine|checkpoint)/[\w./-]+\.\w+)"
)


def navigation(node: Any) -> list[str]:
    if isinstance(node, str):
        return [node]
    return [name for part in (node.values() if isinstance(node, dict) else node) for name in navigation(part)]


def test_every_page_is_in_the_navigation_once() -> None:
    named = navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(named) == sorted(page.name for page in DOCS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    lost = [target for target, _ in LINK.findall(text) if not (page.parent / target).exists()]
    assert lost == []
    places = (ROOT, ROOT / "seqmtp_serve", ROOT / "tests", ROOT / "services")
    named = [path for path in CODE_PATH.findall(text) if "*" not in path]
    assert [path for path in named if not any((place / path).exists() for place in places)] == []


def test_a_lost_link_would_be_noticed() -> None:
    assert LINK.findall("[a](there.md#part) [b](https://x.y) [c](#here)") == [("there.md", "part")]
    assert CODE_PATH.findall("in `services/nowhere.py` and `frontier/gone.py`") == [
        "services/nowhere.py",
        "frontier/gone.py",
    ]
