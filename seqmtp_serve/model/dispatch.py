"""How tokens reach the experts they chose, and how the outputs come back: one object, passed to each MoE layer.

`LocalDispatcher` is the form for one process, which holds every expert: it only says which row goes through which
expert, and counts.

Shapes: T tokens of this rank, d hidden, k experts a token, P (token, expert) pairs for this rank's experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Protocol

from torch import Tensor


@dataclass(slots=True, kw_only=True)
class Tally:
    """What the MoE layers that share a dispatcher did since the start. The main model and the MTP module have one each.

    `num_touched` adds up the distinct experts of this rank that each layer pass computed: weights that had to be read.
    They are counted where they are computed; `settle` brings what is outstanding there, in one transfer.
    """

    num_passes: int = 0  # layer passes
    num_pairs: int = 0  # (token, expert) pairs computed on this rank
    num_touched: int = 0
    sent_bytes: int = 0  # to other ranks, dispatch and combine
    outstanding: Tensor | None = None  # experts touched that only a device knows of

    def count_pass(self, *, num_pairs: int, num_touched: Tensor | int) -> None:
        """One layer pass is done."""
        self.num_passes += 1
        self.num_pairs += num_pairs
        if isinstance(num_touched, int):
            self.num_touched += num_touched
        else:
            self.outstanding = num_touched if self.outstanding is None else self.outstanding + num_touched

    def settle(self) -> Tally:
        """All of it as numbers, once a step."""
        if self.outstanding is not None:
            self.num_touched += int(self.outstanding)
            self.outstanding = None
        return self

    def since(self, earlier: Tally) -> Tally:
        """What was added after `earlier`, a copy of this tally. Both are settled."""
        names = [each.name for each in fields(self) if each.name != "outstanding"]
        return Tally(**{name: getattr(self, name) - getattr(earlier, name) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """Pairs for this rank's experts: row p goes through expert `experts_P[p]`. They lie rank after rank."""

    rows_Pd: Tensor
    experts_P: Tensor  # global ids, int64
    num_pairs_from: tuple[int, ...]  # of each rank
    num_pairs_to: tuple[int, ...]  # of this rank's tokens, to each rank


class Dispatcher(Protocol):
    """Every rank of a group calls both methods for each layer pass, in the same order, with tokens or without."""

    tally: Tally

    def dispatch(self, x_Td: Tensor, experts_Tk: Tensor) -> Arrived:
        """Hand each token to the holders of its experts (k ascending ids a token); returns what arrived here."""
        ...

    def combine(self, out_Pd: Tensor, arrived: Arrived, experts_Tk: Tensor) -> Tensor:
        """Give the pairs' outputs back. Returns those of this rank's tokens, `[T, k, d]`, ordered as `experts_Tk`."""
        ...


@dataclass(slots=True, kw_only=True)
class LocalDispatcher:
    """Everything is here already."""

    tally: Tally = field(default_factory=Tally)

    def dispatch(self, x_Td: Tensor, experts_Tk: Tensor) -> Arrived:
        rows_Pd, experts_P = x_Td.repeat_interleave(experts_Tk.shape[1], 0), experts_Tk.flatten()
        return Arrived(
            rows_Pd=rows_Pd, experts_P=experts_P, num_pairs_from=(len(rows_Pd),), num_pairs_to=(len(rows_Pd),)
        )

    def combine(self, out_Pd: Tensor, arrived: Arrived, experts_Tk: Tensor) -> Tensor:
        return out_Pd.view(*experts_Tk.shape, out_Pd.shape[1])
