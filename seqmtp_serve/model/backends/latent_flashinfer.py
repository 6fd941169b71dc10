"""FlashInfer's paged MLA for absorbed latent attention: `flashinfer.mla.BatchMLAPagedAttentionWrapper`.

Written against flashinfer-python 0.7.4, whose wrapper takes CSR metadata and packed rows: query `[N, H, C + r]`, cache
`[P, p, C + r]`, which is how this package keeps both. It never met a GPU here: tests check the call against the
signatures of that release and its metadata against the documented meaning, and nothing is known of its speed.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from seqmtp_serve.model.attention import Span

if TYPE_CHECKING:
    from seqmtp_serve.model.backends.latent_attention import LatentCase

PACKAGE, OLDEST = "flashinfer-python", (0, 7, 4)
V3_SIZES = (512, 64)  # latent, rotary: what its kernels are compiled for
WORKSPACE_BYTES = 128 * 2**20


class FlashInfer:
    """Half precision on a CUDA device, V3's head sizes."""

    name = "flashinfer"

    def unavailable(self) -> str:
        if not torch.cuda.is_available():
            return "no CUDA device"
        try:
            found = version(PACKAGE)
        except PackageNotFoundError:
            return f"{PACKAGE} is not installed"
        numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
        return "" if numbers >= OLDEST else f"{PACKAGE} {found} is older than {'.'.join(map(str, OLDEST))}"

    def refuses(self, case: LatentCase) -> str:
        if (case.latent_size, case.rope_size) != V3_SIZES:
            return f"compiled for a latent of 512 and a rotary part of 64, not {case.latent_size} and {case.rope_size}"
        if case.device.type != "cuda":
            return f"the tensors lie on {case.device}"
        if case.dtype not in (torch.bfloat16, torch.float16):
            return f"{case.dtype} is not half precision"
        if case.numerics.invariant:
            return "it splits long caches by the load, which invariant numerics forbid"
        if case.skips_slots:
            return "it cannot hide the slots before a sequence's first row"
        return ""

    def make(self, case: LatentCase) -> FlashInferKernel:
        return FlashInferKernel(case, importlib.import_module("flashinfer.mla"))


class FlashInferKernel:
    """One wrapper and its workspace. `mla` is the module `flashinfer.mla`."""

    def __init__(self, case: LatentCase, mla: Any) -> None:
        self._case, self._metadata = case, mla.MLAPlanMetadata
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.int8, device=case.device)
        self._wrapper = mla.BatchMLAPagedAttentionWrapper(workspace)

    def plan(self, spans: Sequence[Span]) -> FlashInferKernel:
        """Itself: the wrapper keeps the plan."""
        case = self._case
        lens = [span.start + span.num_rows for span in spans]
        held = [-(-length // case.page_size) for length in lens]
        pages = [page for span, count in zip(spans, held, strict=True) for page in span.pages[:count]]
        metadata = self._metadata.csr(
            qo_indptr=self._int32(list(accumulate((span.num_rows for span in spans), initial=0))),
            kv_indptr=self._int32(list(accumulate(held, initial=0))),
            kv_indices=self._int32(pages),
            kv_len_arr=self._int32(lens),
        )
        self._wrapper.plan(
            metadata=metadata,
            num_heads=case.num_heads,
            head_dim_ckv=case.latent_size,
            head_dim_kpe=case.rope_size,
            page_size=case.page_size,
            causal=True,  # aligned to the newest row
            sm_scale=case.softmax_scale,
            q_data_type=case.dtype,
            kv_data_type=case.dtype,
        )
        return self

    def attend(self, rows_NHE: Tensor, pool_SE: Tensor) -> Tensor:
        """See `LatentPlan`."""
        pages_PpE = pool_SE.view(-1, self._case.page_size, pool_SE.shape[1])
        out_NHC: Tensor = self._wrapper.run(query=rows_NHE, kv_cache=pages_PpE)
        return out_NHC

    def _int32(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._case.device)
