"""The feed-forward part of a block: one SwiGLU, or routed experts beside a shared one.

The outputs of a row's experts are summed by rising expert id, wherever the experts are, so the sum has one order.

Shapes: N rows, d hidden, I inner size, K chosen experts, P = N * K pairs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqmtp_serve.model.deepseek_config import DeepseekConfig
from seqmtp_serve.training.v3.exchange import Exchange
from seqmtp_serve.training.v3.gate import Gate
from seqmtp_serve.training.v3.products import Arithmetic, RowLinear, each


class SwiGlu(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, size: int, inner: int, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.gate_proj = RowLinear(size, inner, arithmetic)
        self.up_proj = RowLinear(size, inner, arithmetic)
        self.down_proj = RowLinear(inner, size, arithmetic)
        self._invariant = arithmetic.invariant

    def forward(self, x_Nd: Tensor) -> Tensor:
        opened_NI = each(F.silu, self.gate_proj(x_Nd), invariant=self._invariant)
        out_Nd: Tensor = self.down_proj(opened_NI * self.up_proj(x_Nd))
        return out_Nd


class MixtureOfExperts(nn.Module):
    """`experts` holds only those this rank owns, under their global ids."""

    def __init__(self, config: DeepseekConfig, arithmetic: Arithmetic, exchange: Exchange) -> None:
        super().__init__()
        moe, d = config.moe, config.hidden_size
        self.gate = Gate(d, moe, arithmetic)
        owned = exchange.owned(moe.num_experts)
        self.experts = nn.ModuleDict({str(e): SwiGlu(d, moe.intermediate_size, arithmetic) for e in owned})
        self.shared_experts = SwiGlu(d, moe.num_shared * moe.intermediate_size, arithmetic) if moe.num_shared else None
        self._exchange, self._num_experts = exchange, moe.num_experts

    def forward(self, x_Nd: Tensor) -> Tensor:
        ids_NK, weights_NK = self.gate(x_Nd)
        order_P = ids_NK.flatten().argsort(stable=True)
        counts_E = torch.bincount(ids_NK.flatten(), minlength=self._num_experts)
        pairs_Pd = x_Nd.repeat_interleave(ids_NK.shape[1], 0)[order_P]
        done_Pd = self._exchange.through(pairs_Pd, counts_E, lambda expert, rows: self.experts[str(expert)](rows))
        outputs_NKd = torch.unflatten(done_Pd[order_P.argsort()], 0, ids_NK.shape)
        mixed_Nd: Tensor = outputs_NKd[:, 0] * weights_NK[:, 0, None]
        for k in range(1, ids_NK.shape[1]):
            mixed_Nd = mixed_Nd + outputs_NKd[:, k] * weights_NK[:, k, None]
        return mixed_Nd if self.shared_experts is None else mixed_Nd + self.shared_experts(x_Nd)
