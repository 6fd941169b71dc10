"""Where the experts of a layer are, and how rows get to them and back.

`Everywhere` is the single-rank form: every expert is here and nothing moves. `Sharded` keeps a contiguous share of the
experts on each rank and moves rows with two all-to-alls (gloo on CPU, NCCL on GPUs). Both run every collective for any
number of rows, none included, forward and backward: a rank without rows never leaves the others waiting.

Shapes: P (row, expert) pairs by rising expert, R rows received, d hidden, E experts, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

RunExpert = Callable[[int, Tensor], Tensor]  # expert id, rows -> rows


class Exchange(Protocol):
    """`through` is a collective: all ranks of a layer call it, in the same order of layers.

    `sharded`: each rank holds other experts than the rest. `sent_bytes`: what left this rank so far, both directions.
    """

    sharded: bool
    sent_bytes: int

    def owned(self, num_experts: int) -> range:
        """The experts whose weights this rank holds."""

    def through(self, pairs_Pd: Tensor, counts_E: Tensor, run: RunExpert) -> Tensor:
        """Each pair's row through its expert: `[P, d]` in the order given; `counts_E` pairs of each expert."""


class Everywhere:
    """Every expert on this rank."""

    sharded, sent_bytes = False, 0

    def owned(self, num_experts: int) -> range:
        return range(num_experts)

    def through(self, pairs_Pd: Tensor, counts_E: Tensor, run: RunExpert) -> Tensor:
        return run_blocks(pairs_Pd, list(enumerate(counts_E.tolist())), run)


class Sharded:
    """Experts shared out over the ranks of `group`."""

    sharded = True

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        self.sent_bytes = 0

    def owned(self, num_experts: int) -> range:
        if num_experts % self._world:
            raise ValueError(f"{num_experts} experts cannot be shared out evenly over {self._world} ranks")
        share = num_experts // self._world
        return range(self._rank * share, (self._rank + 1) * share)

    def through(self, pairs_Pd: Tensor, counts_E: Tensor, run: RunExpert) -> Tensor:
        owned = self.owned(len(counts_E))
        arriving_WS = torch.empty(self._world, len(owned), dtype=torch.long)
        dist.all_to_all_single(arriving_WS, counts_E.view(self._world, -1).contiguous(), group=self._group)
        leaving = counts_E.view(self._world, -1).sum(1).tolist()
        received_Rd = self._move(pairs_Pd, leaving, arriving_WS.sum(1).tolist())
        # Rows arrive by (source, expert); an expert wants its rows together.
        expert_R = torch.arange(len(owned)).repeat(self._world).repeat_interleave(arriving_WS.flatten())
        order_R = expert_R.argsort(stable=True)
        blocks = [(owned[at], count) for at, count in enumerate(arriving_WS.sum(0).tolist())]
        done_Rd = run_blocks(received_Rd[order_R], blocks, run)[order_R.argsort()]
        return self._move(done_Rd, arriving_WS.sum(1).tolist(), leaving)

    def _move(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        moved: Tensor = _Move.apply(rows, send, receive, self)  # type: ignore[no-untyped-call]
        return moved

    def _all_to_all(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        arrived = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), receive, send, group=self._group)
        stays = send[self._rank]
        self.sent_bytes += (len(rows) - stays) * rows[:1].numel() * rows.element_size() if len(rows) else 0
        return arrived


class _Move(torch.autograd.Function):
    """Rows to their ranks; the gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], exchange: Sharded) -> Tensor:
        ctx.way_back = (receive, send, exchange)
        return exchange._all_to_all(rows, send, receive)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        send, receive, exchange = ctx.way_back
        return exchange._all_to_all(grads[0], send, receive), None, None, None


def run_blocks(rows_Rd: Tensor, blocks: list[tuple[int, int]], run: RunExpert) -> Tensor:
    """Consecutive blocks `(expert, number of rows)` each through its expert; no rows at all stay as they are."""
    done, at = [], 0
    for expert, count in blocks:
        if count:
            done.append(run(expert, rows_Rd.narrow(0, at, count)))
        at += count
    return torch.cat(done) if done else rows_Rd
