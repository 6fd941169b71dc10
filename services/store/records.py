"""How a request's record lies in Redis: two keys in one hash slot, values as the protobuf messages of the wire."""

from __future__ import annotations

from collections.abc import Sequence

from seqmtp_serve.ports import Snapshot
from seqmtp_serve.request import CommittedRow, FinishReason, Request
from services.rpc.convert import from_wire, to_wire
from services.rpc.wire import common

Entry = tuple[bytes, Sequence[bytes]]  # of a stream: id, flat fields


def keys(request_id: str) -> tuple[str, str]:
    """State hash and row stream. The braces put both into the same hash slot."""
    return f"seqmtp:{{{request_id}}}:state", f"seqmtp:{{{request_id}}}:rows"


def pack_request(request: Request) -> bytes:
    """What `unpack_request` reads."""
    return bytes(to_wire(request).SerializeToString())


def unpack_request(data: bytes) -> Request:
    """Inverse of `pack_request`."""
    return from_wire(Request, common.Request.FromString(data))


def pack_row(row: CommittedRow) -> bytes:
    """What `unpack_row` reads."""
    return bytes(to_wire(row).SerializeToString())


def unpack_row(data: bytes) -> CommittedRow:
    """Inverse of `pack_row`."""
    return from_wire(CommittedRow, common.CommittedRow.FromString(data))


def pack_finish(finish: FinishReason | None) -> str:
    """The state's `finish` field: empty while the request goes on."""
    return "" if finish is None else finish.value


def unpack_snapshot(reply: tuple[Sequence[bytes], Sequence[Entry]]) -> Snapshot | None:
    """A snapshot from the answer of `acquire` or `snapshot`; None if there is no such record."""
    flat, entries = reply
    if not flat:
        return None
    state = dict(zip(flat[::2], flat[1::2], strict=True))
    rows = [unpack_row(fields[1]) for entry_id, fields in entries if is_row(entry_id)]
    return Snapshot(
        request=unpack_request(state[b"request"]),
        epoch=int(state[b"epoch"]),
        version=int(state[b"version"]),
        digest=state[b"digest"],
        rows=tuple(rows),
        finish=FinishReason(state[b"finish"].decode()) if state[b"finish"] else None,
        owner=state[b"owner"].decode(),
        meta={"lease_until_ms": state[b"lease"].decode()},
    )


def is_row(entry_id: bytes) -> bool:
    """Entry `<version>-0` is a row; `<version>-1` says that the request ended without another one."""
    return entry_id.endswith(b"-0")
