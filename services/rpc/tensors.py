"""Hidden rows on the wire: raw little-endian bytes, shape and dtype."""

from __future__ import annotations

import torch

from services.rpc.wire import common

WIRE_DTYPES = {
    torch.float32: common.DTYPE_F32,
    torch.float16: common.DTYPE_F16,
    torch.bfloat16: common.DTYPE_BF16,
    torch.int8: common.DTYPE_I8,
}


def pack_tensor(rows: torch.Tensor) -> common.Tensor:
    """A tensor of one of `WIRE_DTYPES` as raw bytes. It is copied: the caller may overwrite it at once."""
    if rows.dtype not in WIRE_DTYPES:
        raise ValueError(f"only {', '.join(map(str, WIRE_DTYPES))} travel, not {rows.dtype}")
    data = rows.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if rows.numel() else b""
    return common.Tensor(data=data, shape=list(rows.shape), dtype=WIRE_DTYPES[rows.dtype])


def unpack_tensor(message: common.Tensor) -> torch.Tensor:
    """The tensor again, writable and owning its memory. Raises ValueError if bytes, shape and dtype disagree."""
    dtype, shape = {number: dtype for dtype, number in WIRE_DTYPES.items()}.get(message.dtype), tuple(message.shape)
    if dtype is None:
        raise ValueError(f"unknown tensor dtype {message.dtype}")
    if len(message.data) != dtype.itemsize * torch.Size(shape).numel():
        raise ValueError(f"a tensor of shape {shape} and {dtype} does not have {len(message.data)} bytes")
    if not message.data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(message.data), dtype=dtype).view(shape)
