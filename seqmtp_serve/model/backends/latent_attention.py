"""Absorbed latent attention over pages, as a kernel: queries already in the latent space, values not yet expanded.

    s = (q_latent . latent + q_rope . key) * scale     out = softmax(s) . latent         (DeepSeek-V2, arXiv 2405.04434)

Sequence b has `lens[b]` cached rows, of which the newest `num_queries` are its own queries': query j sees the first
`lens[b] - num_queries + 1 + j`. Kernel libraries are compiled for V3's sizes only (latent 512, rotary 64).

Shapes: B sequences, Q queries of each, H heads, C latent and r rotary size, P pages of p rows, M pages of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from seqmtp_serve.model.backends.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentCase:
    """What decides whether a kernel fits. `device` is torch's word: cpu, cuda."""

    latent_size: int
    rope_size: int
    num_heads: int
    page_size: int
    dtype: torch.dtype
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentBatch:
    """One call. `pages_BM` may hold any page id beyond a sequence's length: those are not read as rows."""

    latent_BQHC: Tensor
    rope_BQHr: Tensor
    cached_PpE: Tensor  # E = C + r: latent, then the rotated key, as `model/mla.py` keeps it
    pages_BM: Tensor  # int32
    lens_B: Tensor  # int32
    scale: float

    @property
    def case(self) -> LatentCase:
        return LatentCase(
            latent_size=self.latent_BQHC.shape[-1],
            rope_size=self.rope_BQHr.shape[-1],
            num_heads=self.latent_BQHC.shape[2],
            page_size=self.cached_PpE.shape[1],
            dtype=self.cached_PpE.dtype,
            device=self.cached_PpE.device.type,
        )


class LatentAttentionBackend(Protocol):
    """`attend` returns `[B, Q, H, C]` in the dtype of the queries."""

    @property
    def name(self) -> str: ...

    def unavailable(self) -> str: ...

    def refuses(self, case: LatentCase) -> str: ...

    def attend(self, batch: LatentBatch) -> Tensor: ...


class TorchReference:
    """One sequence after the other, scores in float32 (float64 for float64 input)."""

    name = "torch"

    def unavailable(self) -> str:
        return ""

    def refuses(self, case: LatentCase) -> str:
        return ""

    def attend(self, batch: LatentBatch) -> Tensor:
        out = torch.empty_like(batch.latent_BQHC)
        num_queries, size = batch.latent_BQHC.shape[1], batch.latent_BQHC.shape[3]
        wide = torch.float64 if out.dtype == torch.float64 else torch.float32
        for b, length in enumerate(batch.lens_B.tolist()):
            rows_SE = batch.cached_PpE[batch.pages_BM[b].long()].flatten(0, 1)[:length].to(wide)
            query_QHE = torch.cat((batch.latent_BQHC[b], batch.rope_BQHr[b]), -1).to(wide)
            scores_QHS = torch.einsum("qhe,se->qhs", query_QHE, rows_SE) * batch.scale
            seen_QS = torch.ones(num_queries, length, dtype=torch.bool, device=out.device).tril(length - num_queries)
            weights_QHS = scores_QHS.masked_fill(~seen_QS[:, None], float("-inf")).softmax(-1)
            out[b] = torch.einsum("qhs,sc->qhc", weights_QHS, rows_SE[:, :size]).to(out.dtype)
        return out


class TorchSdpa:
    """The whole batch in one fused call, on any device: one key/value head that all query heads share, and values that
    are a prefix of the keys. Gathers the pages first, so it moves every cached row once more than a paged kernel does.
    """

    name = "sdpa"

    def unavailable(self) -> str:
        return ""

    def refuses(self, case: LatentCase) -> str:
        if case.device == "cpu" and case.dtype != torch.float32:
            return "on a CPU half precision is slower than the reference"
        return ""

    def attend(self, batch: LatentBatch) -> Tensor:
        num_sequences, num_queries, num_heads, size = batch.latent_BQHC.shape
        rows_BSE = batch.cached_PpE[batch.pages_BM.long()].flatten(1, 2)
        position_S = torch.arange(rows_BSE.shape[1], device=rows_BSE.device)
        last_BQ = (batch.lens_B[:, None] - num_queries + torch.arange(num_queries, device=rows_BSE.device)).long()
        seen_BQS = position_S <= last_BQ[..., None]
        # A page beyond the length may hold anything: what is masked must be finite, or 0 * NaN spoils the sum.
        rows_BSE = rows_BSE.masked_fill((position_S >= batch.lens_B[:, None])[..., None], 0.0)
        query_BQHE = torch.cat((batch.latent_BQHC, batch.rope_BQHr), -1)
        mixed_BHQC = F.scaled_dot_product_attention(
            query_BQHE.transpose(1, 2),
            rows_BSE[:, None],
            rows_BSE[:, None, :, :size],
            seen_BQS[:, None],
            scale=batch.scale,
            enable_gqa=True,
        )
        return mixed_BHQC.transpose(1, 2).reshape(num_sequences, num_queries, num_heads, size)


class FlashInfer:
    """FlashInfer's paged MLA (`flashinfer.mla.BatchMLAPagedAttentionWrapper`, flashinfer-python 0.7). Never run by this
    project's own tests so far: they need a GPU.
    """

    name = "flashinfer"
    _WORKSPACE_BYTES = 128 * 2**20

    def __init__(self) -> None:
        self._wrapper: Any = None

    def unavailable(self) -> str:
        if not torch.cuda.is_available():
            return "no CUDA device"
        if find_spec("flashinfer") is None:
            return "flashinfer-python is not installed"
        return ""

    def refuses(self, case: LatentCase) -> str:
        if (case.latent_size, case.rope_size) != (512, 64):
            return f"compiled for a latent of 512 and a rotary part of 64, not {case.latent_size} and {case.rope_size}"
        if case.dtype not in (torch.bfloat16, torch.float16):
            return f"{case.dtype} is not half precision"
        if case.device != "cuda":
            return f"the tensors lie on {case.device}"
        return ""

    def attend(self, batch: LatentBatch) -> Tensor:
        num_sequences, num_queries, num_heads, size = batch.latent_BQHC.shape
        page_size, device = batch.cached_PpE.shape[1], batch.cached_PpE.device
        if self._wrapper is None:
            from flashinfer.mla import BatchMLAPagedAttentionWrapper

            workspace = torch.empty(self._WORKSPACE_BYTES, dtype=torch.int8, device=device)
            self._wrapper = BatchMLAPagedAttentionWrapper(workspace)
        pages_B = (batch.lens_B + page_size - 1) // page_size
        held_BM = torch.arange(batch.pages_BM.shape[1], device=device) < pages_B[:, None]
        first_page = F.pad(pages_B.cumsum(0), (1, 0)).int()
        first_query = torch.arange(num_sequences + 1, dtype=torch.int32, device=device) * num_queries
        self._wrapper.plan(
            first_query,
            first_page,
            batch.pages_BM[held_BM].int(),
            batch.lens_B.int(),
            num_heads,
            size,
            batch.rope_BQHr.shape[-1],
            page_size,
            True,  # causal, aligned to the newest row
            batch.scale,
            batch.latent_BQHC.dtype,
            batch.cached_PpE.dtype,
        )
        out: Tensor = self._wrapper.run(
            batch.latent_BQHC.flatten(0, 1),
            batch.rope_BQHr.flatten(0, 1),
            batch.cached_PpE[..., :size].contiguous(),
            batch.cached_PpE[..., size:].contiguous(),
        )
        return out.view(num_sequences, num_queries, num_heads, size)


LATENT_ATTENTION: Registry[LatentAttentionBackend] = Registry(
    "latent attention", (FlashInfer(), TorchSdpa(), TorchReference())
)
