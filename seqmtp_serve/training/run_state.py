"""Where a run stands, and its file: module, optimiser moments and position in one safetensors file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """``batch`` counts batches done in this epoch; ``files`` are the shards the epoch started with."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    rows: int = 0  # counted step-1 rows so far
    seconds: float = 0.0
    files: tuple[str, ...] = ()


def save_run(path: Path, module: torch.nn.Module, optimizer: torch.optim.Optimizer, state: RunState) -> None:
    """Write beside, then rename: an interrupted save leaves the old file."""
    tensors = {f"module.{name}": value.detach().contiguous() for name, value in module.state_dict().items()}
    for index, moments in optimizer.state_dict()["state"].items():
        for name, value in moments.items():
            tensors[f"optimizer.{index}.{name}"] = torch.as_tensor(value).contiguous()
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"state": json.dumps(asdict(state))})
    partial.rename(path)


def load_run(path: Path, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> RunState:
    """Fill the module (and optimiser) from a file of :func:`save_run`."""
    with safe_open(path, framework="pt") as stored:
        state = json.loads(stored.metadata()["state"])
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    module.load_state_dict({k.removeprefix("module."): v for k, v in tensors.items() if k.startswith("module.")})
    if optimizer is not None:
        content = optimizer.state_dict()
        content["state"] = {}
        for key, value in tensors.items():
            if key.startswith("optimizer."):
                _, index, name = key.split(".", 2)
                content["state"].setdefault(int(index), {})[name] = value
        optimizer.load_state_dict(content)
    return RunState(**{**state, "files": tuple(state["files"])})
