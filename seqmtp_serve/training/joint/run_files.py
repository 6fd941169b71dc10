"""The checkpoints of a run: a file for each rank, and one small file that says which step is whole.

    recipe.json                 what the run is made of
    latest.json                 the last step of which every rank's file is on disk
    step-00000200/rank0.safetensors, rank1.safetensors

A step is written beside the others and named in latest.json (by rename) only when all ranks are done, so whatever
happens in between, the step that latest.json names is intact. Parameters are stored once, under their first name.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from seqmtp_serve.errors import CheckpointNotWritten, TrainingError
from seqmtp_serve.training.ranks import Ranks

LATEST = "latest.json"
REFINED = "refined"  # in latest.json: the record of a last phase that trained the MTP layer alone
_KEPT = 2  # whole steps left on disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands: `stream` counts those of this epoch that all ranks have read."""

    step: int = 0
    tokens: int = 0
    epoch: int = 0
    stream: int = 0
    seconds: float = 0.0


def save_step(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, ranks: Ranks, layout: str
) -> None:
    """A collective. Raises CheckpointNotWritten on every rank when any of them could not write its file."""
    step = folder / f"step-{progress.step:08d}"
    fault = _write_own(step / f"rank{ranks.rank}.safetensors", model, optimizer)
    if ranks.summed([fault is not None])[0]:
        if ranks.rank == 0:
            shutil.rmtree(step, ignore_errors=True)
        found = latest(folder)
        last = f"step {found['progress']['step']} is intact" if found else "there is none before"
        reason = fault or "another rank could not write"
        raise CheckpointNotWritten(f"{step}: {reason}; {last}: make room and start the run again") from fault
    if ranks.rank == 0:
        record = {"ranks": ranks.size, "layout": layout, "progress": asdict(progress)}
        _name_latest(folder, record)
        for old in sorted(folder.glob("step-*"))[:-_KEPT]:
            shutil.rmtree(old)
    ranks.barrier()


def save_refined(folder: Path, model: nn.Module, progress: Progress, layout: str, refined: dict[str, Any]) -> None:
    """Write a whole model as the one rank's step it came from. Raises CheckpointNotWritten."""
    step = folder / f"step-{progress.step:08d}"
    if (fault := _write_own(step / "rank0.safetensors", model, None)) is not None:
        shutil.rmtree(step, ignore_errors=True)
        raise CheckpointNotWritten(f"{step}: {fault}; make room and start the same command again") from fault
    _name_latest(folder, {"ranks": 1, "layout": layout, "progress": asdict(progress), REFINED: refined})


def _name_latest(folder: Path, record: dict[str, Any]) -> None:
    partial = folder / f"{LATEST}.partial"
    partial.write_text(json.dumps(record) + "\n", encoding="utf-8")
    partial.replace(folder / LATEST)


def latest(folder: Path) -> dict[str, Any] | None:
    """What latest.json says, if a step is whole."""
    path = folder / LATEST
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def load_step(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks, layout: str) -> Progress:
    """Continue from the latest whole step, or from nothing. Raises TrainingError for another number of ranks."""
    found = latest(folder)
    if found is None:
        return Progress()
    if REFINED in found:
        raise TrainingError(f"{folder}: its MTP layer was refined alone; continue the run it came from instead")
    if (found["ranks"], found["layout"]) != (ranks.size, layout):
        had = f"{found['ranks']} ranks in layout {found['layout']!r}"
        raise TrainingError(f"{folder}: was trained on {had}; continue it with the same")
    progress = Progress(**found["progress"])
    stored = read_rank(folder, progress.step, ranks.rank)
    own = own_tensors(model)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(stored[f"model.{name}"])
    for name, parameter in model.named_parameters():
        moments = {kind: stored.get(f"optimizer.{kind}.{name}") for kind in ("step", "exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {kind: value for kind, value in moments.items() if value is not None}
    return progress


def read_rank(folder: Path, step: int, rank: int) -> dict[str, Tensor]:
    """One rank's file: `model.*` and `optimizer.*`."""
    with safe_open(folder / f"step-{step:08d}" / f"rank{rank}.safetensors", framework="pt") as stored:
        return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters (each once) and buffers by name."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _write_own(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> OSError | None:
    tensors = {f"model.{name}": tensor.detach().contiguous() for name, tensor in own_tensors(model).items()}
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items() if optimizer else ():
            tensors[f"optimizer.{kind}.{name}"] = value.contiguous()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(save(tensors))
            file.flush()
            os.fsync(file.fileno())
    except OSError as fault:
        return fault
    return None
