"""How a request's record lies in Redis: two keys in one hash slot, values as the protobuf messages of the wire.

A row is kept without what its key and its entry say already, and without its timings and its reason: the record grows
by about 40 bytes a row and what the server adds. Each entry says under which epoch it was written, and the ancestry
digest after it: who reads it elsewhere can check that it follows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from seqmtp_serve.ports import Snapshot
from seqmtp_serve.request import CommittedRow, FinishReason, Ref, Request
from services.rpc.convert import from_wire, to_wire
from services.rpc.wire import common

_NOT_KEPT = frozenset(("request_id", "version", "epoch", "digest", "timings_ms", "depth_reason"))
Entry = tuple[bytes, Sequence[bytes]]  # of a stream: id, flat fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """What a look over all records says of one that has not ended."""

    request_id: str
    owner: str
    epoch: int
    lease_left_s: float


def keys(request_id: str) -> tuple[str, str]:
    """State hash and row stream. The braces put both into the same hash slot."""
    return f"seqmtp:{{{request_id}}}:state", f"seqmtp:{{{request_id}}}:rows"


STATES = "seqmtp:{*}:state"  # a SCAN pattern


def request_id_of(key: bytes) -> str:
    """The request whose state or rows lie under `key`."""
    return key.decode().removeprefix("seqmtp:{").rpartition("}:")[0]


def pack_request(request: Request) -> bytes:
    """What `unpack_request` reads."""
    return bytes(to_wire(request).SerializeToString())


def unpack_request(data: bytes) -> Request:
    """Inverse of `pack_request`."""
    return from_wire(Request, common.Request.FromString(data))


def pack_row(row: CommittedRow) -> bytes:
    """What `commit` writes as the entry's `row`."""
    return bytes(to_wire(row, without=_NOT_KEPT).SerializeToString())


def unpack_row(request_id: str, entry_id: bytes, entry: Mapping[bytes, bytes]) -> CommittedRow:
    """The row in an entry of the stream, but for what the live row alone says."""
    row = from_wire(CommittedRow, common.CommittedRow.FromString(entry[b"row"]))
    ref = unpack_ref(request_id, entry_id, entry)
    return replace(row, request_id=request_id, version=ref.version, epoch=ref.epoch, digest=ref.digest)


def unpack_ref(request_id: str, entry_id: bytes, entry: Mapping[bytes, bytes]) -> Ref:
    """The state that the record had after an entry of the stream was written."""
    version = version_of(entry_id)
    return Ref(request_id=request_id, epoch=int(entry[b"epoch"]), version=version, digest=entry[b"digest"])


def pack_meta(meta: Mapping[str, str] | None) -> str:
    """The state's `meta` field."""
    return json.dumps(dict(meta or {}), separators=(",", ":"))


def pack_finish(finish: FinishReason | None) -> str:
    """The state's `finish` field: empty while the request goes on."""
    return "" if finish is None else finish.value


def unpack_snapshot(reply: tuple[int, int, Sequence[bytes], Sequence[Entry]]) -> Snapshot | None:
    """A snapshot from the answer of `acquire` or `snapshot`; None if there is no such record."""
    acquired, lease_left_ms, flat, entries = reply
    if not flat:
        return None
    state = dict(zip(flat[::2], flat[1::2], strict=True))
    request = unpack_request(state[b"request"])
    rows = [
        unpack_row(request.request_id, entry_id, dict(zip(flat[::2], flat[1::2], strict=True)))
        for entry_id, flat in entries
        if is_row(entry_id)
    ]
    return Snapshot(
        request=request,
        epoch=int(state[b"epoch"]),
        version=int(state[b"version"]),
        digest=state[b"digest"],
        rows=tuple(rows),
        finish=FinishReason(state[b"finish"].decode()) if state[b"finish"] else None,
        owner=state[b"owner"].decode(),
        meta=json.loads(state[b"meta"]),
        acquired=bool(acquired),
        lease_left_s=lease_left_ms / 1e3,
    )


def is_row(entry_id: bytes) -> bool:
    """Entry `<version>-0` is a row; `<version>-1` says that the request ended without another one."""
    return entry_id.endswith(b"-0")


def version_of(entry_id: bytes) -> int:
    """The record's version after the entry."""
    return int(entry_id.partition(b"-")[0])
