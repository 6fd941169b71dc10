"""The objective of joint training: L = L_main + (λ/D) Σ_k L_k (DeepSeek-V3 report, arXiv 2412.19437, eq. 24 and 25).

A depth's loss is a sum of negative log likelihoods over its counted rows, divided by one of two denominators:

    paper_fixed_T     T, the declared length of the packed stream, whatever the depth's number of rows
    valid_row_mean    the number of counted rows: what Megatron-LM's MTP divides by

They differ by the factor rows/T, so they weigh depths differently, and a run names the one it was trained with.
Numerators and denominators are both summed over streams and ranks before anything is divided: a mean of per-rank means
weighs the rows of small ranks more.

Shapes: N rows, M counted rows, V vocabulary, D depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqmtp_serve.training.loss_weight import LossWeightSchedule
from seqmtp_serve.training.packing import CompiledStream, RowTensors
from seqmtp_serve.training.ranks import Ranks


class Reduction(StrEnum):
    PAPER_FIXED_T = "paper_fixed_T"
    VALID_ROW_MEAN = "valid_row_mean"


class EmptyDepth(StrEnum):
    """What a depth without a counted row on any rank does to the mean over depths."""

    ZERO_KEPT = "zero_kept"  # it contributes 0 and D stays
    RENORMALISED = "renormalised"  # the mean is over the others: a different weighting


class Wiring(StrEnum):
    """What a depth is fed with."""

    SEQUENTIAL = "sequential"  # the state of the depth before and the shifted token: DeepSeek's modules
    # The main model's state alone, at every depth: the heads of Gloeckle et al., arXiv 2404.19737, built from the same
    # blocks. A baseline for ablations; not a DeepSeek MTP module, and never exported as one.
    INDEPENDENT = "independent"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveContract:
    """What is minimised; `record` is its part of the manifest of anything trained with it.

    `detach_trunk` cuts the MTP gradient at the state that depth one is fed with: a different training program.
    """

    schedule: LossWeightSchedule
    reduction: Reduction = Reduction.PAPER_FIXED_T
    empty_depth: EmptyDepth = EmptyDepth.ZERO_KEPT
    detach_trunk: bool = False
    wiring: Wiring = Wiring.SEQUENTIAL

    def record(self) -> dict[str, Any]:
        return {
            "program": "mtp_detached_from_trunk" if self.detach_trunk else "joint",
            "wiring": str(self.wiring),
            "main_loss": "mean over its own labelled rows",
            "mtp_reduction": str(self.reduction),
            "mtp_denominator": "declared stream length T, padding included"
            if self.reduction is Reduction.PAPER_FIXED_T
            else "counted rows of the depth",
            "mtp_numerator_mask": "label is a real token of the row's own document, and counted",
            "empty_depth": str(self.empty_depth),
            "depth_combination": "lambda / D * sum over depths",
            "reduction_order": "numerators and denominators summed over streams and ranks, then divided",
            "teacher_forcing": "ground-truth shifted tokens",
            "loss_weight_phases": [list(phase) for phase in self.schedule.phases],
            "loss_weight_boundary": "a phase owns its first token",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Denominators: declared tokens, labelled main rows, counted rows of each depth."""

    length: int
    main: int
    depths: tuple[int, ...]


def counts_of(streams: Sequence[CompiledStream], ranks: Ranks) -> Counts:
    """Over all streams of all ranks; a collective. Raises ValueError for no token or no depth."""
    depths = len(streams[0].depths)
    length, main, *rows = ranks.summed(
        [
            sum(stream.length for stream in streams),
            sum(len(stream.main.labels_M) for stream in streams),
            *(sum(len(stream.depths[k].labels_M) for stream in streams) for k in range(depths)),
        ]
    )
    if length < 1 or depths < 1:
        raise ValueError("the objective needs at least one token and one depth")
    return Counts(length=int(length), main=int(main), depths=tuple(int(count) for count in rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One depth of one stream: a sum that is part of the graph even when it has no row, and how often argmax hit."""

    nll_sum: Tensor
    hits: int


def term(logits_NV: Tensor, rows: RowTensors) -> Term:
    """Sum over the counted rows. Without any: 0 with a gradient of exactly 0, so that every rank's graph is alike."""
    if not len(rows.loss_rows_M):
        return Term(nll_sum=logits_NV.sum() * 0.0, hits=0)
    counted_MV = logits_NV[rows.loss_rows_M]
    return Term(
        nll_sum=F.cross_entropy(counted_MV, rows.labels_M, reduction="sum"),
        hits=int((counted_MV.detach().argmax(-1) == rows.labels_M).sum()),
    )


def denominators(totals: Counts, reduction: Reduction) -> tuple[int, ...]:
    """What each depth's sum is divided by; 0 where the depth is empty and the form has no other denominator."""
    if reduction is Reduction.PAPER_FIXED_T:
        return (totals.length,) * len(totals.depths)
    return totals.depths


def mtp_loss(sums: Sequence[Tensor], totals: Counts, contract: ObjectiveContract, weight: float) -> Tensor:
    """(λ/D) Σ_k sum_k / denominator_k, with `weight` λ. An empty depth keeps its (zero) sum in the graph."""
    empty = [count == 0 for count in totals.depths]
    kept = len(sums) if contract.empty_depth is EmptyDepth.ZERO_KEPT else max(1, empty.count(False))
    scaled = [total / max(1, by) for total, by in zip(sums, denominators(totals, contract.reduction), strict=True)]
    return torch.stack(scaled).sum() * (weight / kept)


def objective(main: Term, depths: Sequence[Term], totals: Counts, contract: ObjectiveContract, weight: float) -> Tensor:
    """This stream's share of L: its sums over everybody's denominators. The shares of all streams and ranks add up."""
    main_loss = main.nll_sum / max(1, totals.main)
    return main_loss + mtp_loss([depth.nll_sum for depth in depths], totals, contract, weight)
