"""One proposal, one request, plain Python: the selection rule everything else in this folder is checked against.

A round enters with the frontier f already emitted. The target pass over [f, y] gave two rows: `target_prob` after f
(it judges y) and `bonus_prob` after y. The rule is the one-proposal case of speculative sampling (Leviathan et al.,
arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isclose, isfinite

SUM_TOLERANCE = 1e-12
"""How far a distribution's float64 sum may be from one, here and in a draft distribution on the wire."""

Sampler = Callable[[Sequence[float]], int]
"""Draws an index from a normalised distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneSelection:
    """The outcome of one round.

    `keep_rows` counts the verify inputs whose target rows become canonical (f, or f and y). `pending` is the next
    frontier: the last new token, when it was sampled and not verified. A stopped request must not materialise it.
    """

    accepted: bool
    new_tokens: tuple[int, ...]
    keep_rows: int
    pending: int | None
    stopped: bool


def select_mtp_one(
    target_prob: Sequence[float],
    draft_prob: Sequence[float],
    draft: int,
    bonus_prob: Sequence[float],
    u: float,
    sample: Sampler,
    *,
    remaining: int,
    eos: int | None = None,
) -> OneSelection:
    """Accept `draft` with probability min(1, p/q), else replace it by a draw from normalised max(p - q, 0).

    `u` is uniform in [0, 1), independent of the draw of `draft`; `sample` must be independent of both. `remaining`
    counts output slots left, f not among them. An accepted EOS, or one in the last slot, gets no bonus: `sample` is
    then not called.

    Raises ValueError for arguments that no correct caller has, and for a rejection without residual mass (possible only
    when the two distributions differ by rounding; `choose.py` accepts there, and counts it).
    """
    _check_arguments(target_prob, draft_prob, draft, bonus_prob, u, remaining)
    new_tokens: tuple[int, ...]
    pending: int | None
    if u < min(1.0, target_prob[draft] / draft_prob[draft]):
        wants_bonus = remaining > 1 and draft != eos
        pending = sample(bonus_prob) if wants_bonus else None
        keep_rows, new_tokens = 2, (draft,) if pending is None else (draft, pending)
    else:
        excess = [max(p - q, 0.0) for p, q in zip(target_prob, draft_prob, strict=True)]
        mass = sum(excess)
        if mass <= 0.0:
            raise ValueError("rejection must have positive residual mass")
        pending = sample([value / mass for value in excess])
        keep_rows, new_tokens = 1, (pending,)
    return OneSelection(
        accepted=keep_rows == 2,
        new_tokens=new_tokens,
        keep_rows=keep_rows,
        pending=pending,
        stopped=len(new_tokens) == remaining or new_tokens[-1] == eos,
    )


def _check_arguments(
    target_prob: Sequence[float],
    draft_prob: Sequence[float],
    draft: int,
    bonus_prob: Sequence[float],
    u: float,
    remaining: int,
) -> None:
    if type(remaining) is not int or remaining < 1:
        raise ValueError("at least one new output slot is required")
    for distribution in (target_prob, draft_prob, bonus_prob):
        aligned = len(distribution) == len(target_prob) > 0
        if not aligned or not is_distribution(distribution):
            raise ValueError("aligned normalized distributions required")
    if type(draft) is not int or not 0 <= draft < len(draft_prob) or draft_prob[draft] <= 0.0:
        raise ValueError("candidate must be sampled from positive draft support")
    if not 0.0 <= u < 1.0:
        raise ValueError("uniform draw must be in [0, 1)")


def is_distribution(values: Sequence[float]) -> bool:
    """Whether the values are finite, not negative, and sum to one within SUM_TOLERANCE."""
    if any(not isfinite(value) or value < 0.0 for value in values):
        return False
    return isclose(sum(values), 1.0, rel_tol=0.0, abs_tol=SUM_TOLERANCE)
