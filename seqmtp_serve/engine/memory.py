"""What a worker holds, in bytes, by owner: the memory ledger.

    M_served = main weights + MTP weights of its own + target rows + MTP rows + branch rows + workspace

Counted by walking the live objects and adding up each tensor's storage once, so a tensor that two owners share is
charged to the first (the target), and a replica is charged again: a proposer in a process of its own pays for
embedding, final norm and head. Rows are those of pages in use. Branch rows are the provisional ones of a round; they
lie inside target pages and are told apart, not added.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from seqmtp_serve.engine.proposer import ProposerEngine
    from seqmtp_serve.engine.target import TargetEngine

_LEAVES = (str, bytes, int, float, bool, type(None), torch.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLedger:
    """Bytes. Weights include the tables of rotary positions. `target_rows` are keys and values, or latents;
    `hidden_rows` the states kept beside them for proposers.
    """

    main_weights: int
    mtp_own_weights: int
    target_rows: int
    hidden_rows: int
    mtp_rows: int
    branch_rows: int
    target_row: int  # one token, all layers
    mtp_row: int

    @property
    def total(self) -> int:
        """Without the workspace of a pass, which is nobody's between passes."""
        return self.main_weights + self.mtp_own_weights + self.target_rows + self.hidden_rows + self.mtp_rows


def memory_ledger(target: TargetEngine, proposer: ProposerEngine | None, *, branch_rows: int) -> MemoryLedger:
    """The ledger of engines in one process, now. `branch_rows` counts the provisional rows of one round."""
    main = storages(target.trunk)
    own = {} if proposer is None else storages(proposer.modules)
    cache, mtp_cache = target.cache, None if proposer is None else proposer.cache
    return MemoryLedger(
        main_weights=sum(main.values()),
        mtp_own_weights=sum(size for place, size in own.items() if place not in main),
        target_rows=cache.num_rows_in_use * cache.row_bytes,
        hidden_rows=cache.num_rows_in_use * cache.hidden_row_bytes,
        mtp_rows=0 if mtp_cache is None else mtp_cache.num_rows_in_use * mtp_cache.row_bytes,
        branch_rows=branch_rows * cache.row_bytes,
        target_row=cache.row_bytes,
        mtp_row=0 if mtp_cache is None else mtp_cache.row_bytes,
    )


def storages(weights: object) -> dict[int, int]:
    """Where the storage of each tensor that `weights` is made of lies -> its bytes."""
    return dict(_storages(weights, set()))


def _storages(node: Any, seen: set[int]) -> Iterator[tuple[int, int]]:
    """(address, bytes) of every tensor reachable from `node` through attributes, fields and containers."""
    if isinstance(node, (*_LEAVES, type)) or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, Tensor):
        yield node.untyped_storage().data_ptr(), node.untyped_storage().nbytes()
    elif isinstance(node, torch.ScriptObject):
        yield id(node), _packed_bytes(node)
    else:
        for part in _parts(node):
            yield from _storages(part, seen)


def _parts(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        yield from node.values()
    elif isinstance(node, list | tuple | set | frozenset):
        yield from node
    elif is_dataclass(node):
        yield from (getattr(node, field.name) for field in fields(node))
    elif type(node).__module__.startswith("seqmtp_serve."):
        yield from vars(node).values() if hasattr(node, "__dict__") else ()


def _packed_bytes(packed: torch.ScriptObject) -> int:
    """int8 codes and a float64 scale a channel. The library's own layout may pad; that is not seen from here."""
    codes, _ = torch.ops.quantized.linear_unpack(packed)
    return int(codes.numel() + 8 * codes.shape[0])
