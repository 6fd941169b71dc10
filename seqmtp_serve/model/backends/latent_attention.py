"""Absorbed latent attention as a kernel: queries already in the latent space, values not yet expanded.

    s = (q_latent . latent + q_rope . key) * scale     out = softmax(s) . latent         (DeepSeek-V2, arXiv 2405.04434)

A cached row is the latent and, after it, the rotated key that all heads share. Rows of several sequences run together;
a `Span` says which cached rows each sees. A kernel plans a pass once, and each layer attends with that plan. All models
and engines of this package attend through `LATENT_ATTENTION`.

Shapes: N rows of a pass, H heads, C latent and r rotary size, E = C + r, S pool slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from seqmtp_serve.model.attention import Span
from seqmtp_serve.model.backends.latent_flashinfer import FlashInfer
from seqmtp_serve.model.backends.latent_torch import Paged, Sdpa, TorchReference
from seqmtp_serve.model.backends.registry import Registry
from seqmtp_serve.model.numerics import Numerics


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentCase:
    """What decides whether a kernel fits.

    `skips_slots`: some spans see nothing before a `first_slot` above 0, as those of MTP modules do.
    """

    latent_size: int
    rope_size: int
    num_heads: int
    page_size: int
    softmax_scale: float
    numerics: Numerics
    skips_slots: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def device(self) -> torch.device:
        """Where rows and pool lie."""
        return self.numerics.device


class LatentPlan(Protocol):
    """A pass of spans: what its layers share."""

    def attend(self, rows_NHE: Tensor, pool_SE: Tensor) -> Tensor:
        """`[N, H, C]`, in the dtype of the rows. The rows' own latents lie in the pool already."""
        ...


class LatentKernel(Protocol):
    """Made for one case. One plan is in use at a time."""

    def plan(self, spans: Sequence[Span]) -> LatentPlan: ...


class LatentAttentionBackend(Protocol):
    """See `registry.Backend`."""

    @property
    def name(self) -> str: ...

    def unavailable(self) -> str: ...

    def refuses(self, case: LatentCase) -> str: ...

    def make(self, case: LatentCase) -> LatentKernel: ...


LATENT_ATTENTION: Registry[LatentAttentionBackend] = Registry(
    "latent attention", (FlashInfer(), Paged(), Sdpa(), TorchReference()), setting="attention"
)
