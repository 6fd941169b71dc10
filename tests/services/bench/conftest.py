"""The bench runs on the tiny checkpoint of the checkpoint tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "unit" / "checkpoint"))
