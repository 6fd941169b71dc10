"""The devices that tests run on: this machine's CPU, a pretended GPU, and a real one where there is one.

`pytest -k cuda` runs the real one's tests; where there is none, each is skipped and says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.unit.pretend_device import pretending

HAS_CUDA = torch.cuda.is_available()
DEVICES = (
    "cpu",
    "pretended",
    pytest.param("cuda", marks=pytest.mark.skipif(not HAS_CUDA, reason="this machine has no CUDA device")),
)


@contextmanager
def using(device: str) -> Iterator[str]:
    """What a configuration calls the device, for as long as it is there."""
    if device == "pretended":
        with pretending():
            yield "cuda:0"
    else:
        yield "cpu" if device == "cpu" else "cuda:0"
