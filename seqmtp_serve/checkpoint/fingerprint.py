"""Fingerprints: which exact values a tensor, and which exact bytes a file, holds."""

from __future__ import annotations

import hashlib
from pathlib import Path

from torch import Tensor


def tensor_fingerprint(tensor: Tensor) -> str:
    """sha256 of the contiguous little-endian float32 bytes, after dequantisation: the same for any storage format."""
    return hashlib.sha256(tensor.detach().float().contiguous().numpy().data).hexdigest()


def file_fingerprint(path: Path) -> str:
    """sha256 of the file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
