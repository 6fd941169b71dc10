"""The fitting loop: AdamW on the module, the target frozen, a checkpoint every few minutes, exact resume.

The order of batches depends on (seed, epoch) and on the shards an epoch started with; both are in the checkpoint, so a
resumed run continues with the very batch it would have seen. New shards join at the next epoch.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from seqmtp_serve.errors import LossDiverged
from seqmtp_serve.training.batches import Batch, epoch_batches
from seqmtp_serve.training.draft_module import DraftModule
from seqmtp_serve.training.loss import DepthLoss, Frozen, batch_losses
from seqmtp_serve.training.objective import Kind
from seqmtp_serve.training.run_state import RunState, load_run, save_run
from seqmtp_serve.training.shards import Document, read_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """What a run is made of; recorded in the manifest. ``depth_weights`` are the loss weights of steps 1..depth."""

    steps: int
    seed: int
    lr: float = 1e-3
    warmup_steps: int = 50
    decay_start: int = 0  # constant until here, then cosine to ``final_lr_share`` at ``steps``
    final_lr_share: float = 0.02
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0
    batch_rows: int = 8192
    num_chains: int = 48
    depth_weights: tuple[float, ...] = (1.0, 0.7, 0.5)
    sharpness: float = 1.0
    divergence: Kind = "kl"
    compute_dtype: str = "bfloat16"

    @property
    def depth(self) -> int:
        return len(self.depth_weights)

    def lr_at(self, step: int) -> float:
        """Learning rate of 0-based ``step``."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if step < self.decay_start:
            return self.lr
        done = (step - self.decay_start) / max(1, self.steps - self.decay_start)
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        return self.lr * (self.final_lr_share + (1 - self.final_lr_share) * share)


class Trainer:
    """One run in ``folder``: ``log.jsonl``, ``latest.safetensors``; continues from the latter when it is there."""

    def __init__(
        self, module: DraftModule, frozen: Frozen, settings: FitSettings, *, shards: Path, folder: Path
    ) -> None:
        self.module, self.frozen, self.settings = module, frozen, settings
        self._shards, self._folder = shards, folder
        groups: list[dict[str, Any]] = [
            {"params": [p for p in module.parameters() if p.ndim > 1]},
            {"params": [p for p in module.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
        )
        self.state = RunState()
        folder.mkdir(parents=True, exist_ok=True)
        if (latest := folder / "latest.safetensors").exists():
            self.state = load_run(latest, module, self.optimizer)

    def run(self, *, save_every_s: float, evaluate: Callable[[], dict[str, Any]] | None = None) -> None:
        """Train to ``settings.steps``; saves on time and at the end, also when interrupted by the keyboard."""
        saved, began, spent = time.time(), time.time(), self.state.seconds
        self._write({"step": self.state.step, "settings": asdict(self.settings)})
        try:
            with tqdm(total=self.settings.steps, initial=self.state.step, unit="step", mininterval=10) as progress:
                for batch in self._batches():
                    losses = self.train_step(batch)
                    self.state = replace(self.state, seconds=spent + time.time() - began)
                    self._log({"step": self.state.step, "lr": self.settings.lr_at(self.state.step - 1)}, losses)
                    progress.update()
                    if time.time() - saved > save_every_s:
                        self._save(evaluate)
                        saved = time.time()
        finally:
            self._save(evaluate)

    def train_step(self, batch: Batch) -> list[DepthLoss]:
        """One optimiser step on the weighted mean of the depths' mean losses."""
        settings = self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = settings.lr_at(self.state.step)
        dtype = getattr(torch, settings.compute_dtype)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            losses = batch_losses(
                self.module,
                batch,
                self.frozen,
                depth=settings.depth,
                sharpness=settings.sharpness,
                kind=settings.divergence,
            )
        objective = sum(
            (
                weight * loss.total / max(1, loss.num_rows)
                for weight, loss in zip(settings.depth_weights, losses, strict=True)
            ),
            torch.zeros(()),
        ) / sum(settings.depth_weights)
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(objective)
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), settings.clip_norm)
        if not torch.isfinite(norm + objective.detach()):
            raise LossDiverged(
                f"step {self.state.step + 1}: loss {float(objective.detach())}, gradient norm {float(norm)}; "
                "nothing was applied: lower the learning rate and continue"
            )
        self.optimizer.step()
        self.state = replace(
            self.state,
            step=self.state.step + 1,
            batch=self.state.batch + 1,
            rows=self.state.rows + losses[0].num_rows,
        )
        return losses

    def _batches(self) -> Iterator[Batch]:
        while self.state.step < self.settings.steps:
            if not self.state.files:
                names = tuple(sorted(path.name for path in self._shards.glob("*.safetensors")))
                if not names:
                    raise FileNotFoundError(f"no shards in {self._shards}")
                self.state = replace(self.state, files=names)
            documents = [doc for doc in load_documents(self._shards, self.state.files) if not is_held_out(doc)]
            batches = epoch_batches(
                documents,
                batch_rows=self.settings.batch_rows,
                num_chains=self.settings.num_chains,
                depth=self.settings.depth,
                seed=self.settings.seed,
                epoch=self.state.epoch,
            )
            skip = self.state.batch
            for index, batch in enumerate(batches):
                if index < skip:
                    continue
                if self.state.step >= self.settings.steps:
                    return
                yield batch
            self.state = replace(self.state, epoch=self.state.epoch + 1, batch=0, files=())

    def _save(self, evaluate: Callable[[], dict[str, Any]] | None) -> None:
        save_run(self._folder / "latest.safetensors", self.module, self.optimizer, self.state)
        if evaluate is not None:
            self._write({"step": self.state.step, "held_out": evaluate()})

    def _log(self, line: dict[str, Any], losses: list[DepthLoss]) -> None:
        line["epoch"], line["rows"], line["seconds"] = self.state.epoch, self.state.rows, round(self.state.seconds, 1)
        line["loss"] = [round(float(loss.total.detach()) / max(1, loss.num_rows), 4) for loss in losses]
        line["agreement"] = [round(loss.hits / max(1, loss.num_rows), 4) for loss in losses]
        self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        with (self._folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")


def load_documents(folder: Path, names: tuple[str, ...]) -> list[Document]:
    """All documents of the named shards, in order."""
    return [document for name in names for document in read_shard(folder / name)]


def is_held_out(document: Document) -> bool:
    """About 3 % of the documents, chosen by their own tokens: the same ones whatever else is in the shards."""
    return int(document.tokens.sum()) % 32 == 0
