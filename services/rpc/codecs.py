"""How one field of a value travels in a protobuf message. Those that hold other values are in `convert.py`."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from seqmtp_serve import request
from services.rpc.wire import common, proposer


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """How one field travels: `pack` gives what the message's constructor takes, `unpack` reads the message's field."""

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]
    optional: bool = False  # a field that keeps track of its presence: absent means None


def pack_ids(ids: tuple[int, ...]) -> bytes:
    """Token ids as little-endian uint32."""
    return struct.pack(f"<{len(ids)}I", *ids)


def unpack_ids(data: bytes) -> tuple[int, ...]:
    """Token ids again. Raises ValueError if the length is not a multiple of 4 bytes."""
    if len(data) % 4:
        raise ValueError(f"token ids come as uint32: {len(data)} bytes are not a multiple of 4")
    return struct.unpack(f"<{len(data) // 4}I", data)


def pack_tensor(rows: Any) -> common.Tensor:
    """See `tensors.py`, which is loaded with the first tensor: who converts only requests and rows needs no torch."""
    from services.rpc import tensors

    return tensors.pack_tensor(rows)


def unpack_tensor(message: common.Tensor) -> Any:
    """See `tensors.py`."""
    from services.rpc import tensors

    return tensors.unpack_tensor(message)


def named(kind: type[Any], prefix: str) -> Codec:
    """A member of an enum: None travels as 0, the message's own "unspecified"."""
    by_value = {member: getattr(common, f"{prefix}_{member.name}") for member in kind}
    by_number = {number: member for member, number in by_value.items()}
    return Codec(pack=lambda member: by_value.get(member, 0), unpack=lambda number: by_number.get(number))


PLAIN = Codec(pack=lambda value: value, unpack=lambda value: value)
OPTIONAL = Codec(pack=lambda value: value, unpack=lambda value: value, optional=True)
TUPLE = Codec(pack=lambda value: value, unpack=tuple)
DICT = Codec(pack=lambda value: value, unpack=dict)
AS_IT_IS = (PLAIN, OPTIONAL, TUPLE, DICT)  # a message's constructor takes the value itself
IDS = Codec(pack=pack_ids, unpack=unpack_ids)
TENSOR = Codec(pack=pack_tensor, unpack=unpack_tensor)
SOME_TENSOR = replace(TENSOR, optional=True)
FINISH = named(request.FinishReason, "FINISH_REASON")
SPARSE = Codec(
    pack=lambda rows: [
        proposer.SparseRow(tokens=[token for token, _ in row], probs=[prob for _, prob in row]) for row in rows
    ],
    unpack=lambda rows: tuple(tuple(zip(row.tokens, row.probs, strict=True)) for row in rows),
)


SEQUENCES = Codec(
    pack=lambda sequences: [common.TokenSequence(tokens=tokens) for tokens in sequences],
    unpack=lambda messages: tuple(tuple(each.tokens) for each in messages),
)
BIASES = Codec(
    pack=lambda pairs: [common.TokenBias(token=token, bias=bias) for token, bias in pairs],
    unpack=lambda messages: tuple((each.token, each.bias) for each in messages),
)
