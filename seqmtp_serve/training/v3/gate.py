"""The `noaux_tc` gate (DeepSeek-V3 report, arXiv 2412.19437, section 2.1.2): sigmoid scores, groups, a choosing bias.

The bias takes part in the choice only: the weights are the unbiased scores. It has no gradient; `balance` moves it
after each step by a fixed amount towards equal load. Ties go to the lower expert id, so that every rank chooses alike.

Shapes: N rows, d hidden, E experts, K chosen experts.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from seqmtp_serve.model.deepseek_config import MoeConfig
from seqmtp_serve.training.v3.products import Arithmetic, each, product


class Gate(nn.Module):
    """`weight` and `e_score_correction_bias` by their released names; scores in float32."""

    e_score_correction_bias: Tensor

    def __init__(self, hidden_size: int, moe: MoeConfig, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.moe, self._invariant = moe, arithmetic.invariant
        self._float32 = replace(arithmetic, products=torch.float32)  # a choice among near scores
        self.weight = nn.Parameter(torch.empty(moe.num_experts, hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(moe.num_experts))
        self.load_E = torch.zeros(moe.num_experts, dtype=torch.long)  # rows routed since the last `balance`

    def forward(self, x_Nd: Tensor) -> tuple[Tensor, Tensor]:
        """`(ids_NK, weights_NK)`: the experts of each row by rising id, and what their outputs are multiplied by."""
        logits_NE = product(x_Nd.float(), self.weight, self._float32)
        scores_NE = each(torch.sigmoid, logits_NE, invariant=self._invariant)
        ids_NK = choose_experts(scores_NE.detach() + self.e_score_correction_bias, self.moe)
        weights_NK = scores_NE.gather(1, ids_NK)
        if self.moe.normalise_weights:
            weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
        if self.training:
            self.load_E += torch.bincount(ids_NK.flatten(), minlength=self.moe.num_experts)
        return ids_NK, weights_NK * self.moe.routed_scaling

    def balance(self, load_E: Tensor, speed: float) -> None:
        """Raise the bias of experts with less than the mean load, lower the others'; forget the load."""
        load_E = load_E.float()
        self.e_score_correction_bias += speed * torch.sign(load_E.mean() - load_E)
        self.load_E.zero_()


def choose_experts(biased_NE: Tensor, moe: MoeConfig) -> Tensor:
    """The `top_k` best of the `top_k_groups` best groups (by the sum of a group's two best): ids, rising, `[N, K]`."""
    grouped = torch.unflatten(biased_NE, -1, (moe.num_groups, -1))
    if moe.num_groups > 1:
        best_two = grouped.sort(-1, descending=True).values[..., :2].sum(-1)
        out_of_it = best_two.sort(dim=-1, descending=True, stable=True).indices[:, moe.top_k_groups :]
        grouped = grouped.scatter(1, out_of_it[..., None].expand(-1, -1, grouped.shape[-1]), float("-inf"))
    best = grouped.flatten(1).sort(dim=-1, descending=True, stable=True).indices[:, : moe.top_k]
    return best.sort(-1).values
