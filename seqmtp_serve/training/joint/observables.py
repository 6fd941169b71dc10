"""One line of log for a step: what a reader needs to judge the run, with numerators and denominators, never bare means.

Every number is over all ranks. A loss can be recomputed from its line: `nll_sum / denominator`, with the denominator of
the form the line names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from seqmtp_serve.training.joint.recipe import Recipe
from seqmtp_serve.training.joint.run_files import Progress
from seqmtp_serve.training.joint_terms import Taps
from seqmtp_serve.training.mtp_objective import Counts, Term, denominators
from seqmtp_serve.training.ranks import Ranks


def reduced_terms(streams: Sequence[tuple[Term, Sequence[Term]]], ranks: Ranks) -> list[tuple[float, int]]:
    """`(nll_sum, hits)` of the main model and each depth, over all streams and ranks; a collective."""
    rows = [[main, *depths] for main, depths in streams]
    flat = [
        value
        for terms in zip(*rows, strict=True)
        for value in (sum(float(t.nll_sum.detach()) for t in terms), sum(t.hits for t in terms))
    ]
    sums = ranks.summed(flat)
    return [(nll, int(hits)) for nll, hits in zip(sums[::2], sums[1::2], strict=True)]


def shared_gradient_norms(taps: Taps, ranks: Ranks) -> dict[str, float]:
    """L2 norms of the MTP part of shared gradients, and of what flows from MTP into the trunk; a collective."""
    trunk = ranks.summed([taps.squares.get("trunk", 0.0)])[0] ** 0.5
    norms = {"mtp_to_trunk": trunk}
    for name in ("embedding", "head"):
        part = torch.nn.Parameter(torch.zeros_like(taps.gradients[name]))
        part.grad = taps.gradients[name].clone()
        ranks.sum_gradients([part])
        norms[f"mtp_to_{name}"] = float(part.grad.norm())
    return norms


def log_line(
    progress: Progress,
    recipe: Recipe,
    totals: Counts,
    terms: Sequence[tuple[float, int]],
    *,
    weight: float,
    lr: float,
    gradient_norm: float,
    shared: dict[str, float],
    loads: dict[str, list[int]],
    sent_bytes: int,
) -> dict[str, Any]:
    """`progress` is the state after the step; `loads` rows routed to each expert, by layer name."""
    contract = recipe.objective
    (main_nll, main_hits), *depths = terms
    by = denominators(totals, contract.reduction)
    return {
        "step": progress.step,
        "tokens": progress.tokens,
        "epoch": progress.epoch,
        "seconds": round(progress.seconds, 2),
        "lr": lr,
        "loss_weight": weight,
        "main": {
            "loss": main_nll / max(1, totals.main),
            "nll_sum": main_nll,
            "rows": totals.main,
            "accuracy": main_hits / max(1, totals.main),
        },
        "mtp_form": str(contract.reduction),
        "mtp": [
            {
                "depth": depth,
                "loss": nll / max(1, denominator),
                "nll_sum": nll,
                "denominator": denominator,
                "rows": rows,
                "accuracy": hits / max(1, rows),
            }
            for depth, ((nll, hits), denominator, rows) in enumerate(
                zip(depths, by, totals.depths, strict=True), start=1
            )
        ],
        "gradient_norm": gradient_norm,
        "shared_gradients": shared,
        "expert_load": loads,
        "sent_bytes": sent_bytes,
    }
