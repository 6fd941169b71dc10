"""The two forms of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), side by side.

A token caches its latent c (after its norm) and one rotated key part k_r that all heads share. Head h's key is
[W_UK_h c ; k_r] and its value W_UV_h c. The naive form makes them; the absorbed form never does, because
q_n . (W_UK_h c) = (W_UK_h^T q_n) . c, and a weighted sum of W_UV_h c is W_UV_h times the weighted sum of c. So absorbed
attention has one key/value head, whose values are the first C columns of its keys.

The two are equal in algebra and not in bits. Both compute in the precision of their input: they are the oracles of
`mla.py`, in float64.

Shapes: N query rows, S cached rows, H heads, n/r/v sizes of a head's plain, rotary and value part, C latent rank,
E = C + r values of a cached row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class UpProjections:
    """`kv_b_proj`, taken apart: what makes a head's key part and value of a latent."""

    keys_HnC: Tensor
    values_HvC: Tensor

    @classmethod
    def split(cls, kv_b_proj_OC: Tensor, num_heads: int, nope_head_dim: int) -> UpProjections:
        """From the stored weight `[H * (n + v), C]`, whose rows are head after head, keys before values."""
        weight = kv_b_proj_OC.view(num_heads, -1, kv_b_proj_OC.shape[1])
        return cls(keys_HnC=weight[:, :nope_head_dim].contiguous(), values_HvC=weight[:, nope_head_dim:].contiguous())


def attend_naive(
    q_nope_NHn: Tensor, q_rope_NHr: Tensor, cached_SE: Tensor, up: UpProjections, scale: float, seen_NS: Tensor
) -> Tensor:
    """Make every head's keys and values, then attend as usual. `seen_NS` is bool; returns `[N, H, v]`."""
    latent_SC, k_rope_Sr = torch.split(cached_SE, [up.keys_HnC.shape[2], q_rope_NHr.shape[2]], -1)
    keys_SHn = torch.einsum("sc,hnc->shn", latent_SC, up.keys_HnC)
    values_SHv = torch.einsum("sc,hvc->shv", latent_SC, up.values_HvC)
    queries_NHe = torch.cat((q_nope_NHn, q_rope_NHr), -1)
    keys_SHe = torch.cat((keys_SHn, k_rope_Sr[:, None].expand(-1, keys_SHn.shape[1], -1)), -1)
    scores_HNS = torch.einsum("nhe,she->hns", queries_NHe, keys_SHe) * scale
    return torch.einsum("hns,shv->nhv", _weights(scores_HNS, seen_NS), values_SHv)


def attend_absorbed(
    q_nope_NHn: Tensor, q_rope_NHr: Tensor, cached_SE: Tensor, up: UpProjections, scale: float, seen_NS: Tensor
) -> Tensor:
    """Attend among the cached rows themselves, with one shared key. `seen_NS` is bool; returns `[N, H, v]`."""
    latent_SC, k_rope_Sr = torch.split(cached_SE, [up.keys_HnC.shape[2], q_rope_NHr.shape[2]], -1)
    q_latent_NHC = torch.einsum("nhm,hmc->nhc", q_nope_NHn, up.keys_HnC)
    scores_HNS = torch.einsum("nhc,sc->hns", q_latent_NHC, latent_SC) + torch.einsum(
        "nhr,sr->hns", q_rope_NHr, k_rope_Sr
    )
    mixed_NHC = torch.einsum("hns,sc->nhc", _weights(scores_HNS * scale, seen_NS), latent_SC)
    return torch.einsum("nhc,hvc->nhv", mixed_NHC, up.values_HvC)


def _weights(scores_HNS: Tensor, seen_NS: Tensor) -> Tensor:
    return torch.softmax(scores_HNS.masked_fill(~seen_NS, float("-inf")), -1)
