"""The machine a figure was measured on, in one line."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_FLAGS = ("avx2", "avx512f", "avx512_vnni", "amx_int8")


def describe_machine(cpuinfo: Path = Path("/proc/cpuinfo"), device: str = "cpu") -> str:
    """CPU, usable cores, the instruction sets that matter here, the GPU if `device` is one, system, Python, torch."""
    found: dict[str, str] = {}
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            found.setdefault(key.strip(), value.strip())
    flags = found.get("flags", "").split()
    parts = [
        found.get("model name") or platform.processor() or platform.machine(),
        f"{_usable_cores()} cores",
        " ".join(flag for flag in _FLAGS if flag in flags),
        "" if device == "cpu" else _gpu(device),
        f"{platform.system()} {platform.machine()}",
        f"Python {platform.python_version()}",
        f"torch {_version('torch')}",
    ]
    return ", ".join(part for part in parts if part)


def _gpu(device: str) -> str:
    import torch

    return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
