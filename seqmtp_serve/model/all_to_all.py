"""Expert parallelism: each rank attends over its own tokens and holds some of the experts; rows travel to the experts.

A token goes once to each rank that holds any of its experts, and each expert's output comes back by itself: the owner
adds them up, in expert order, as a single process would. Works on any backend of torch.distributed that moves bytes
with uneven splits (gloo on CPU, NCCL on GPUs). Three exchanges a layer: counts, rows with their expert ids, outputs.

Shapes: W ranks, T tokens of this rank, k experts a token, d hidden, S rows sent, R rows received, P pairs here.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from seqmtp_serve.model.dispatch import Arrived, Tally
from seqmtp_serve.model.expert_placement import experts_of, first_experts


class AllToAllDispatcher:
    """Implements dispatch.Dispatcher over a process group. All ranks must run the same sequence of layer passes."""

    def __init__(self, num_experts: int, group: dist.ProcessGroup | None = None) -> None:
        """`group` None: the default one."""
        self.tally = Tally()
        self._group = group
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._own = experts_of(self._rank, self._world_size, num_experts)
        self._stops = torch.tensor(first_experts(self._world_size, num_experts)[1:])

    def dispatch(self, x_Td: Tensor, experts_Tk: Tensor) -> Arrived:
        goes_WT = self._by_holder(experts_Tk)
        token_S = goes_WT.nonzero()[:, 1]  # rank after rank, tokens in order
        num_sent = goes_WT.sum(1).tolist()
        num_received = self._counts(num_sent, x_Td.device)
        rows_Rd, experts_Rk = self._exchange_rows(x_Td[token_S], experts_Tk[token_S], num_sent, num_received)
        mine_Rk = (experts_Rk >= self._own.start) & (experts_Rk < self._own.stop)
        num_pairs_from = [int(part.sum()) for part in torch.split(mine_Rk, num_received)]
        return Arrived(
            rows_Pd=rows_Rd[mine_Rk.nonzero()[:, 0]],
            experts_P=experts_Rk[mine_Rk],
            num_pairs_from=tuple(num_pairs_from),
        )

    def combine(self, out_Pd: Tensor, arrived: Arrived, experts_Tk: Tensor) -> Tensor:
        holder_P = self._holder(experts_Tk).flatten()
        num_back = torch.bincount(holder_P, minlength=self._world_size).tolist()
        back_Pd = self._exchange(out_Pd, list(arrived.num_pairs_from), num_back)
        # They come rank after rank, and from each in the order of tokens and experts: a stable sort by rank undoes it.
        parts_Pd = torch.empty_like(back_Pd).index_copy_(0, holder_P.argsort(stable=True), back_Pd)
        return parts_Pd.view(*experts_Tk.shape, out_Pd.shape[1])

    def _holder(self, experts_Tk: Tensor) -> Tensor:
        return torch.bucketize(experts_Tk, self._stops.to(experts_Tk.device), right=True)

    def _by_holder(self, experts_Tk: Tensor) -> Tensor:
        """`[W, T]`: whether rank w holds any expert of token t."""
        goes_TW = torch.zeros(len(experts_Tk), self._world_size, dtype=torch.bool, device=experts_Tk.device)
        return goes_TW.scatter_(1, self._holder(experts_Tk), True).T

    def _counts(self, num_sent: list[int], device: torch.device) -> list[int]:
        """How many rows each rank will send here."""
        sent_W = torch.tensor(num_sent, device=device)
        return self._exchange(sent_W.unsqueeze(1), [1] * self._world_size, [1] * self._world_size).flatten().tolist()

    def _exchange_rows(
        self, rows_Sd: Tensor, experts_Sk: Tensor, num_sent: list[int], num_received: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Rows and their expert ids in one message, as bytes."""
        ids_Sk = experts_Sk.to(torch.int32)
        packed_SB = torch.cat((rows_Sd.view(torch.uint8), ids_Sk.view(torch.uint8)), 1)
        packed_RB = self._exchange(packed_SB, num_sent, num_received)
        row_bytes = rows_Sd.shape[1] * rows_Sd.element_size()
        rows_Rd = packed_RB[:, :row_bytes].contiguous().view(rows_Sd.dtype)
        return rows_Rd, packed_RB[:, row_bytes:].contiguous().view(torch.int32).long()

    def _exchange(self, rows: Tensor, num_sent: list[int], num_received: list[int]) -> Tensor:
        """The first `num_sent[0]` rows go to rank 0, and so on; what arrives lies in the same order."""
        received = rows.new_empty(sum(num_received), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), num_received, num_sent, group=self._group)
        to_others = len(rows) - num_sent[self._rank]
        self.tally.sent_bytes += to_others * rows.shape[1] * rows.element_size()
        return received
