"""The loop of joint training: read streams, sum numerators over everybody's denominators, step, balance, record.

One object runs on each rank. A step is the same sequence of collectives on all of them, whatever rows they hold; a loss
that is no number is seen by all ranks before anything is applied.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from seqmtp_serve.errors import BadCorpus, LossDiverged
from seqmtp_serve.training.joint.corpus import Corpus
from seqmtp_serve.training.joint.observables import log_line, reduced_terms, shared_gradient_norms
from seqmtp_serve.training.joint.recipe import Recipe
from seqmtp_serve.training.joint.run_files import Progress, load_step, save_step
from seqmtp_serve.training.joint.streams import epoch_streams, packed, share_of
from seqmtp_serve.training.joint_terms import Taps, joint_terms
from seqmtp_serve.training.mtp_objective import counts_of, objective
from seqmtp_serve.training.packing import CompiledStream, compile_stream
from seqmtp_serve.training.ranks import Ranks
from seqmtp_serve.training.sharing import require_aliases, require_one_slot_each
from seqmtp_serve.training.v3.exchange import Everywhere, Exchange, Sharded
from seqmtp_serve.training.v3.experts import MixtureOfExperts
from seqmtp_serve.training.v3.model import V3Model, initialise
from seqmtp_serve.training.v3.products import Arithmetic


class JointTrainer:
    """One rank of a run in `folder`; continues from its latest whole step."""

    def __init__(self, recipe: Recipe, corpus: Corpus, folder: Path, ranks: Ranks) -> None:
        self.recipe, self.ranks, self._corpus, self._folder = recipe, ranks, corpus, folder
        self._exchange: Exchange = Sharded() if recipe.layout == "expert" and ranks.size > 1 else Everywhere()
        arithmetic = Arithmetic(products=getattr(torch, recipe.optimization.products))
        self.model = V3Model(recipe.model, recipe.mtp, arithmetic=arithmetic, exchange=self._exchange)
        initialise(self.model, seed=recipe.optimization.seed, std=recipe.optimization.init_std)
        require_aliases(self.model)
        self.optimizer = _adamw(self.model, recipe)
        require_one_slot_each(self.model, self.optimizer)
        sharded = self._exchange.sharded
        experts = {id(p) for layer in self._moe().values() for p in layer.experts.parameters()} if sharded else set()
        self._own = [p for p in self.model.parameters() if id(p) in experts]
        self._replicated = [p for p in self.model.parameters() if id(p) not in experts]
        self._held_epoch: tuple[int, list[list[list[int]]]] = (-1, [])
        self.progress = load_step(folder, self.model, self.optimizer, ranks, recipe.layout)

    def run(self, *, save_every_s: float, until: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the log line of each step up to `until` (default: the recipe's end); save on time and at the end.

        Rank 0's clock decides when to save, so that all ranks save the same step.
        """
        end = self.recipe.optimization.steps if until is None else until
        saved = began = time.monotonic()
        spent = self.progress.seconds
        while self.progress.step < end:
            line = self.step(spent + time.monotonic() - began)
            yield line
            due = self.ranks.rank == 0 and time.monotonic() - saved > save_every_s
            if self.ranks.summed([due])[0] or self.progress.step == end:
                self.save()
                saved = time.monotonic()

    def step(self, seconds: float = 0.0) -> dict[str, Any]:
        """One optimizer step on the next streams. Raises LossDiverged and changes nothing when a number is none."""
        plan, contract = self.recipe.optimization, self.recipe.objective
        streams, after = self._next_streams()
        totals, weight = counts_of(streams, self.ranks), contract.schedule.at(self.progress.tokens)
        taps, sent = Taps(), self._exchange.sent_bytes
        self.optimizer.zero_grad(set_to_none=True)
        terms = []
        for stream in streams:
            main, depths = joint_terms(self.model, stream, contract, taps)
            torch.autograd.backward(objective(main, depths, totals, contract, weight))
            terms.append((main, depths))
        sums = reduced_terms(terms, self.ranks)
        self.ranks.sum_gradients(self._replicated)
        norm = self._clip(plan.clip_norm, sums)
        lr = plan.lr_at(self.progress.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        loads = self._balance(plan.balance_speed if self.progress.tokens < plan.balance_until else 0.0)
        self.progress = replace(after, seconds=seconds)
        return log_line(
            self.progress,
            self.recipe,
            totals,
            sums,
            weight=weight,
            lr=lr,
            gradient_norm=norm,
            shared=shared_gradient_norms(taps, self.ranks),
            loads=loads,
            sent_bytes=int(self.ranks.summed([self._exchange.sent_bytes - sent])[0]),
        )

    def save(self) -> None:
        """A collective; see `run_files.save_step`."""
        save_step(self._folder, self.model, self.optimizer, self.progress, self.ranks, self.recipe.layout)

    def _next_streams(self) -> tuple[list[CompiledStream], Progress]:
        """This rank's share of the next step, and the progress once it is done."""
        plan, at = self.recipe.optimization, self.progress
        streams = self._epoch(at.epoch)
        if at.stream + plan.streams_per_step > len(streams):  # a last, incomplete step is not taken
            at = replace(at, epoch=at.epoch + 1, stream=0)
            streams = self._epoch(at.epoch)
        stop = at.stream + plan.streams_per_step
        mine = share_of(self.ranks.rank, self.ranks.size, streams[at.stream : stop])
        depths = self.recipe.mtp.num_modules
        compiled = [compile_stream(packed(windows, plan.stream_len), depths) for windows in mine]
        return compiled, replace(at, step=at.step + 1, tokens=at.tokens + plan.tokens_per_step, stream=stop)

    def _epoch(self, epoch: int) -> list[list[list[int]]]:
        if self._held_epoch[0] != epoch:
            plan = self.recipe.optimization
            streams = epoch_streams(
                self._corpus, window=plan.window, stream_len=plan.stream_len, seed=plan.seed, epoch=epoch
            )
            if len(streams) < plan.streams_per_step:
                raise BadCorpus(f"the corpus makes {len(streams)} streams, a step reads {plan.streams_per_step}")
            self._held_epoch = (epoch, streams)
        return self._held_epoch[1]

    def _clip(self, limit: float, sums: list[tuple[float, int]]) -> float:
        """Scale every gradient so that the norm of all of them, experts of other ranks too, is at most `limit`."""
        common = sum(float(p.grad.square().sum()) for p in self._replicated if p.grad is not None)
        experts = sum(float(p.grad.square().sum()) for p in self._own if p.grad is not None)
        norm = math.sqrt(common + self.ranks.summed([experts])[0])
        numbers = torch.tensor([norm, *(nll for nll, _ in sums)])
        if not bool(torch.isfinite(numbers).all()):
            raise LossDiverged(
                f"step {self.progress.step + 1}: losses {[nll for nll, _ in sums]}, gradient norm {norm}; nothing was "
                "applied: lower the learning rate and continue from the latest checkpoint"
            )
        if norm > limit:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(limit / norm)
        return norm

    def _balance(self, speed: float) -> dict[str, list[int]]:
        """Move each gate's bias by the load of all ranks; returns the loads."""
        loads = {}
        for name, layer in self._moe().items():
            load = self.ranks.summed(layer.gate.load_E.tolist())
            layer.gate.balance(torch.tensor(load), speed)
            loads[name] = [int(rows) for rows in load]
        return loads

    def _moe(self) -> dict[str, MixtureOfExperts]:
        layers = self.model.model.layers.named_children()
        return {f"layer {n}": layer.mlp for n, layer in layers if isinstance(layer.mlp, MixtureOfExperts)}


def append_line(folder: Path, line: dict[str, Any]) -> None:
    """Add a line to the run's log."""
    with (folder / "log.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _adamw(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Weight decay on matrices only."""
    plan = recipe.optimization
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=plan.lr, betas=plan.betas, weight_decay=plan.weight_decay)
