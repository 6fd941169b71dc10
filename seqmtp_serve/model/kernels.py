"""The two compiled kernels that the hot loop calls, without the Python layers that torch puts around every operator.

Those layers serve tracing and subclasses, and cost 5 to 10 µs a call: a tenth of a one-row step. Both operators are
private or deprecated in torch, so this is the only file that names them, and `probe.py` tries them at start-up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[..., Any]


def _compiled(operator: Any) -> Kernel:
    kernel: Kernel = getattr(operator.default, "_op", operator)
    return kernel


_int8_product = _compiled(torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32)
_flash = _compiled(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)


def int8_product(x_NI: Tensor, step: float, zero_point: int, packed: torch.ScriptObject) -> Tensor:
    """Round `x / step` to unsigned codes around `zero_point`, multiply exactly in integers, scale back: `[N, O]`."""
    out_NO: Tensor = _int8_product(x_NI, step, zero_point, packed)
    return out_NO


def flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """CPU attention `[T, G, M, D]` with an additive mask, and its log-sum-exp `[T, G, M]`."""
    out, lse = _flash(q, k, v, attn_mask=mask, scale=scale)
    return out, lse
