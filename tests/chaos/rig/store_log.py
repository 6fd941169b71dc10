"""The store's own log as history: the append-only file, read while the server writes it.

The server writes a command to this file before it answers (`services/store/embedded.py`), so a row that a client has
and the file has not was shown before its commit: no clocks are compared. A file that was cut at a crash is read on
from its last whole command.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.rpc.wire import common
from tests.chaos.history import Claimed, Committed, FellBack, StoreEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Where a record is."""

    epoch: int
    version: int


class StoreLog:
    """`events` grows with `read()`. One reader for the server that takes writes, and for those that follow it."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / "appendonlydir"
        self._offsets: dict[Path, int] = {}
        self._epochs: dict[str, int] = {}
        self._expire_at_ms: dict[str, int] = {}  # Unix time
        self.events: list[StoreEvent] = []

    def read(self) -> int:
        """Take in what was written since. Returns how many events there are now."""
        for file in sorted(self._folder.glob("*.incr.aof"), key=lambda file: int(file.name.split(".")[-3])):
            with file.open("rb") as data:
                data.seek(self._offsets.get(file, 0))
                used = self._take(data.read())
            self._offsets[file] = self._offsets.get(file, 0) + used
        return len(self.events)

    def go_on_with(self, directory: Path, records: Mapping[str, Record], *, promised: bool) -> None:
        """Another server goes on with these records. What its files hold so far it had from the first: passed over.

        A record whose replay window is over is nobody's loss.
        """
        self.read()
        known = {event.request_id for event in self.events}
        known = {request_id for request_id in known if self._expire_at_ms[request_id] > 1e3 * time.time()}
        self._folder = directory / "appendonlydir"
        self._offsets = {file: file.stat().st_size for file in self._folder.glob("*.incr.aof")}
        for request_id in sorted(known):
            record = records.get(request_id, Record(epoch=0, version=0))
            self._epochs[request_id] = record.epoch
            self.events.append(
                FellBack(request_id=request_id, epoch=record.epoch, version=record.version, promised=promised)
            )

    def _take(self, data: bytes) -> int:
        """Apply every whole transaction in `data`; how many bytes that were."""
        position = used = 0
        block: list[list[bytes]] | None = None
        while (parsed := _command(data, position)) is not None:
            command, position = parsed
            match command[0].upper():
                case b"MULTI":
                    block = []
                    continue
                case b"EXEC":
                    self._apply(block or [])
                    block = None
                case _ if block is not None:
                    block.append(command)
                    continue
                case _:
                    self._apply([command])
            used = position
        return used

    def _apply(self, commands: list[list[bytes]]) -> None:
        """One script's effects."""
        for command in commands:
            name, rest = command[0].upper(), command[1:]
            if not rest or not rest[0].startswith(b"seqmtp:{"):
                continue
            request_id, _, kind = rest[0].decode().removeprefix("seqmtp:{").rpartition("}:")
            if name == b"HINCRBY" and rest[1] == b"epoch":
                self._claimed(request_id, self._epochs.get(request_id, 0) + int(rest[2]), commands)
            elif name == b"HSET" and kind == "state":
                fields = dict(zip(rest[1::2], rest[2::2], strict=True))
                if int(fields.get(b"epoch", 0)) > 0:
                    self._claimed(request_id, int(fields[b"epoch"]), commands)
            elif name == b"PEXPIREAT" and kind == "state":
                self._expire_at_ms[request_id] = int(rest[1])
            elif name == b"XADD" and kind == "rows" and rest[1].endswith(b"-0"):
                self._committed(request_id, rest, commands)

    def _claimed(self, request_id: str, epoch: int, commands: list[list[bytes]]) -> None:
        self._epochs[request_id] = epoch
        owner = _field(commands, b"owner")
        self.events.append(Claimed(request_id=request_id, epoch=epoch, owner=owner.decode()))

    def _committed(self, request_id: str, added: list[bytes], commands: list[list[bytes]]) -> None:
        row = common.CommittedRow.FromString(added[added.index(b"row") + 1])
        self.events.append(
            Committed(
                request_id=request_id,
                epoch=int(_field(commands, b"committed_by") or self._epochs.get(request_id, 0)),
                version=int(added[1].split(b"-")[0]),
                tokens=tuple(row.tokens),
            )
        )


def _field(commands: list[list[bytes]], name: bytes) -> bytes:
    """The last value that a transaction's HSETs give to a field; empty: none does."""
    value = b""
    for command in commands:
        if command[0].upper() == b"HSET":
            value = dict(zip(command[2::2], command[3::2], strict=True)).get(name, value)
    return value


def _command(data: bytes, position: int) -> tuple[list[bytes], int] | None:
    """The command at `position` and where the next begins; None while it is not whole."""
    end = data.find(b"\r\n", position)
    if end < 0:
        return None
    if data[position : position + 1] == b"#":  # an annotation
        return [b"#"], end + 2
    num_words = int(data[position + 1 : end])
    words, position = [], end + 2
    for _ in range(num_words):
        end = data.find(b"\r\n", position)
        if end < 0:
            return None
        length = int(data[position + 1 : end])
        stop = end + 2 + length
        if stop + 2 > len(data):
            return None
        words.append(data[end + 2 : stop])
        position = stop + 2
    return words, position
