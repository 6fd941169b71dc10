"""How far a client has come in a stream: what an event id says, and what `Last-Event-ID` gives back.

    chatcmpl-7f…:9@31.5e2c91            row 9 of the record; 31 tokens are out, and the check names which
    chatcmpl-7f…:9@31.5e2c91f           the same, and the chunk that says why it ended
    chatcmpl-7f…:9@31.5e2c91f:usage     and the usage chunk; `:done` for [DONE]
    chatcmpl-7f…:3@7.0c11d2,-,0         three choices: one at row 3, one of which nothing was sent, one just opened

A stream is a function of the record: a resumed one is computed from the first row again, and what the cursor covers is
not sent. The number of tokens is what counts. The version is the public sequence number; it may differ when a store
that lost rows had them generated again. The check is a hash of those tokens: a text that is not the one the client has
is never continued.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from struct import pack
from typing import Literal

from seqmtp_serve.errors import InvalidField, StoreBehind

HEADER = "Last-Event-ID"
Tail = Literal["", "usage", "done"]
_ID = re.compile(r"(?P<job>[\w-]{1,128}):(?P<positions>[\w@.,-]{1,8192})(:(?P<tail>usage|done))?", re.ASCII)
_POSITION = re.compile(r"(?P<version>\d{1,9})(@(?P<tokens>\d{1,9})\.(?P<check>[0-9a-f]{6})(?P<closed>f?))?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where one choice is. `closed`: its finish chunk was sent. `check` None: only the version is known."""

    version: int
    num_tokens: int = 0
    check: str | None = None
    closed: bool = False

    def __str__(self) -> str:
        if self.check is None:
            return str(self.version)
        return f"{self.version}@{self.num_tokens}.{self.check}{'f' * self.closed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Where a whole stream is; None for a choice of which nothing was sent."""

    job_id: str
    positions: tuple[Position | None, ...]
    tail: Tail = ""

    def __str__(self) -> str:
        places = ",".join("-" if position is None else str(position) for position in self.positions)
        return f"{self.job_id}:{places}" + (f":{self.tail}" if self.tail else "")


def parse_cursor(text: str) -> Cursor:
    """Inverse of `str(cursor)`. Raises InvalidField."""
    found = _ID.fullmatch(text)
    places = [] if found is None else [_POSITION.fullmatch(place) for place in found["positions"].split(",")]
    wrong = found is None or any(
        place is None and text != "-" for place, text in zip(places, found["positions"].split(","), strict=True)
    )
    if found is None or wrong:
        raise InvalidField(f"'{HEADER}' is not an event id of this server.", param=HEADER)
    tail: Tail = "usage" if found["tail"] == "usage" else "done" if found["tail"] else ""
    return Cursor(job_id=found["job"], positions=tuple(map(_position, places)), tail=tail)


def _position(place: re.Match[str] | None) -> Position | None:
    if place is None:
        return None
    return Position(
        version=int(place["version"]),
        num_tokens=int(place["tokens"] or 0),
        check=place["check"],
        closed=bool(place["closed"]),
    )


def cursor_after(job_id: str, versions: Sequence[int]) -> Cursor:
    """The cursor of a client that knows sequence numbers only, one a choice: it has every event up to it."""
    places = tuple(Position(version=version) if version else None for version in versions)
    return Cursor(job_id=job_id, positions=places)


class Progress:
    """How far one choice's stream is, and which of its tokens a client that was at `seen` still lacks."""

    def __init__(self, seen: Position | None) -> None:
        self._seen = seen
        self._hash = blake2b(digest_size=3, person=b"seqmtp.cursor")
        self._version = self._num_tokens = 0
        self.closed = False

    @property
    def position(self) -> Position:
        """Now."""
        check = self._hash.hexdigest() if self._num_tokens else None
        return Position(version=self._version, num_tokens=self._num_tokens, check=check, closed=self.closed)

    @property
    def opening_is_new(self) -> bool:
        """Whether the client lacks the chunk that opens this choice."""
        return self._seen is None

    @property
    def ending_is_new(self) -> bool:
        """Whether the client lacks the finish chunk of this row."""
        seen = self._seen
        return seen is None or not (seen.closed or (self._by_version and self._version <= seen.version))

    @property
    def all_was_seen(self) -> bool:
        """Whether the client knows a version that covers every event of what came so far."""
        return self._seen is not None and self._by_version and self._version <= self._seen.version

    def advance(self, version: int, tokens: tuple[int, ...]) -> int:
        """Take a row; returns how many of its tokens, from the first, the client has.

        Raises StoreBehind when the tokens up to the cursor are not those that the client was given.
        """
        seen, before, self._version = self._seen, self._num_tokens, version
        for token in tokens:
            self._hash.update(pack("<I", token))
            self._num_tokens += 1
            if seen is not None and self._num_tokens == seen.num_tokens and seen.check != self._hash.hexdigest():
                raise StoreBehind(f"The text up to token {seen.num_tokens} is not the one that was sent before.")
        if seen is None:
            return 0
        if self._by_version:
            return len(tokens) if version <= seen.version else 0
        return min(max(seen.num_tokens - before, 0), len(tokens))

    def end(self) -> None:
        """The choice is over. Raises StoreBehind when it is over before it came to the cursor."""
        self.closed = True
        if self._seen is not None and self._num_tokens < self._seen.num_tokens:
            raise StoreBehind(f"The text ended before token {self._seen.num_tokens}, up to which it was sent before.")

    @property
    def _by_version(self) -> bool:
        return self._seen is not None and self._seen.check is None and self._seen.version > 0
