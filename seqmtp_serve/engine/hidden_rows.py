"""Hidden rows on their way to a proposer: which of a prompt's are sent, and in which form.

Drafts are all that depends on either: a row that was rounded, or never sent, costs acceptance, never a token.

    fp32   as they are
    fp16   clamped to its range      bf16   8 bits of precision, the range of fp32
    int8   codes of -127 .. 127 and one float32 scale a row, max |x| / 127

Shapes: n rows, d hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from seqmtp_serve.errors import ProtocolError

HiddenDtype = Literal["fp32", "fp16", "bf16", "int8"]
_FP16_MAX = torch.finfo(torch.float16).max
_FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_LEVELS = 127.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenPolicy:
    """`window`: of a text that a proposer is opened with only the last so many rows are sent; 0: all of them."""

    window: int = 0
    dtype: HiddenDtype = "fp32"

    def first_base(self, num_prefix: int, num_known: int) -> int:
        """Where a proposer begins that is opened when P has `num_prefix` positions, or `num_known` by now."""
        return max(0, max(num_prefix, num_known) - self.window) if self.window else 0


def pack(rows_nd: Tensor, dtype: HiddenDtype) -> tuple[Tensor, Tensor | None]:
    """float32 rows as they travel, and the scales `[n]` of int8 ones."""
    if dtype == "int8":
        scales_n = rows_nd.abs().amax(1) / _LEVELS
        codes_nd = (rows_nd / scales_n.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round()
        return codes_nd.nan_to_num().clamp(-_LEVELS, _LEVELS).to(torch.int8), scales_n
    if dtype == "fp16":
        rows_nd = rows_nd.clamp(-_FP16_MAX, _FP16_MAX)
    return rows_nd.to(_FLOATS[dtype]), None


def unpack(rows_nd: Tensor, scales_n: Tensor | None) -> Tensor:
    """float32 rows again. Raises ProtocolError for a form that `pack` does not give."""
    if rows_nd.dtype is torch.int8:
        if scales_n is None or scales_n.dtype is not torch.float32 or scales_n.shape != rows_nd.shape[:1]:
            raise ProtocolError("int8 hidden rows need one float32 scale each")
        return rows_nd.float() * scales_n[:, None]
    if scales_n is not None or rows_nd.dtype not in _FLOATS.values():
        raise ProtocolError(
            f"hidden rows do not travel as {rows_nd.dtype}{' with scales' if scales_n is not None else ''}"
        )
    return rows_nd.float()


def num_bytes(rows_nd: Tensor, scales_n: Tensor | None) -> int:
    """What travels."""
    return sum(each.numel() * each.element_size() for each in (rows_nd, scales_n) if each is not None)
