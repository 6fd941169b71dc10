"""Expert parallelism: each rank attends over its own tokens and holds some of the experts; rows travel to the experts.

A token goes once to each rank that holds any of its experts, and each expert's output comes back by itself: the owner
adds them up, in expert order, as a single process would. Works on any backend of torch.distributed that moves bytes
with uneven splits (gloo on CPU, NCCL on GPUs). Three exchanges a layer: counts, rows with their expert ids, outputs.
The host has to know the counts, so it waits for the device once a layer, and reads them all together.

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
        holder_Tk = self._holder(experts_Tk)
        goes_WT = self._by_holder(holder_Tk)
        (num_sent, num_pairs_to), (num_received, num_pairs_from) = self._counts(goes_WT, holder_Tk)
        token_S = torch.nonzero_static(goes_WT, size=sum(num_sent))[:, 1]  # rank after rank, tokens in order
        rows_Rd, experts_Rk = self._exchange_rows(x_Td[token_S], experts_Tk[token_S], num_sent, num_received)
        mine_Rk = (experts_Rk >= self._own.start) & (experts_Rk < self._own.stop)
        row_P, choice_P = torch.nonzero_static(mine_Rk, size=sum(num_pairs_from)).unbind(1)
        return Arrived(
            rows_Pd=rows_Rd[row_P],
            experts_P=experts_Rk[row_P, choice_P],
            num_pairs_from=tuple(num_pairs_from),
            num_pairs_to=tuple(num_pairs_to),
        )

    def combine(self, out_Pd: Tensor, arrived: Arrived, experts_Tk: Tensor) -> Tensor:
        holder_P = self._holder(experts_Tk).flatten()
        back_Pd = self._exchange(out_Pd, list(arrived.num_pairs_from), list(arrived.num_pairs_to))
        # They come rank after rank, and from each in the order of tokens and experts: a stable sort by rank undoes it.
        parts_Pd = torch.empty_like(back_Pd).index_copy_(0, holder_P.argsort(stable=True), back_Pd)
        return parts_Pd.view(*experts_Tk.shape, out_Pd.shape[1])

    def _holder(self, experts_Tk: Tensor) -> Tensor:
        self._stops = self._stops.to(experts_Tk.device)  # once: rows do not change their device
        return torch.bucketize(experts_Tk, self._stops, right=True)

    def _by_holder(self, holder_Tk: Tensor) -> Tensor:
        """`[W, T]`: whether rank w holds any expert of token t."""
        goes_TW = torch.zeros(len(holder_Tk), self._world_size, dtype=torch.bool, device=holder_Tk.device)
        return goes_TW.scatter_(1, holder_Tk, True).T

    def _counts(self, goes_WT: Tensor, holder_Tk: Tensor) -> list[list[list[int]]]:
        """Rows and pairs, by rank: those that go there, and those that come from there."""
        num_rows_W, holder_P = goes_WT.sum(1), holder_Tk.flatten()
        num_pairs_W = torch.zeros_like(num_rows_W).scatter_add_(0, holder_P, torch.ones_like(holder_P))
        sent_W2 = torch.stack((num_rows_W, num_pairs_W), 1)
        received_W2 = self._exchange(sent_W2, [1] * self._world_size, [1] * self._world_size)
        counts: list[list[list[int]]] = torch.stack((sent_W2.T, received_W2.T)).tolist()
        return counts

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
