from __future__ import annotations

from pathlib import Path

import pytest
from tiny_checkpoint import TinyFiles


@pytest.fixture
def files(tmp_path: Path) -> TinyFiles:
    return TinyFiles(tmp_path)
