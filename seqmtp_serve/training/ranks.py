"""The processes of a run, as an object: `Alone` does nothing special, `Joined` reduces over a process group.

Every method is a collective: all ranks call it, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from seqmtp_serve import rank_group


class Ranks(Protocol):
    rank: int
    size: int

    def summed(self, values: Sequence[float]) -> list[float]:
        """Elementwise sum over the ranks, in float64."""

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace each gradient by its sum over the ranks; a missing one counts (and stays) as zeros."""

    def barrier(self) -> None:
        """Return when all ranks have come here."""


class Alone:
    """One process."""

    rank, size = 0, 1

    def summed(self, values: Sequence[float]) -> list[float]:
        return [float(value) for value in values]

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        fill_missing(parameters)

    def barrier(self) -> None:
        return


class Joined:
    """A rank of a `torch.distributed` group: gloo on CPU, NCCL on GPUs."""

    def __init__(self, rank: int, size: int, rendezvous: Path, *, backend: str = "gloo", timeout_s: float = 60) -> None:
        """Blocks until all ranks met at `rendezvous`, a file that must not outlive the run. `timeout_s` bounds every
        collective: a lost peer becomes a RuntimeError in the others."""
        rank_group.begin(
            backend,
            init_method=rendezvous.absolute().as_uri(),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        self.rank, self.size = rank, size

    def summed(self, values: Sequence[float]) -> list[float]:
        total = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(total)
        return [float(value) for value in total]

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        held = list(parameters)
        fill_missing(held)
        gradients = [parameter.grad for parameter in held if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def barrier(self) -> None:
        dist.barrier()

    def leave(self) -> None:
        rank_group.end()


def fill_missing(parameters: Iterable[Tensor]) -> None:
    """Zeros where no gradient arrived (an expert without a row): the optimizer then treats it alike on every layout."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
