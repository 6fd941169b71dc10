"""What a run leaves behind: events seen by clients, the store's own log of each frontier, and what is still held.

Plain values. Times are seconds on one clock that all recorders of a run share (virtual in the simulation). Order in a
tuple is the order in which things were seen; the checker relies on that order, and on times only where it says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# ---- seen by a client --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Invoked:
    """A client asked for a stream. `reference` is what plain decoding of the same request gives.

    `text` and `finish` are what of it may be shown and how it ends; None where the run has no text.
    """

    stream: str
    request_id: str
    at: float
    reference: tuple[int, ...]
    text: str | None = None
    finish: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One event of a stream. `log_len` is how much of the store's log was written when it arrived."""

    stream: str
    version: int
    tokens: tuple[int, ...]
    at: float
    log_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A connection of the stream was lost, or ended with an error that a client answers by asking again."""

    stream: str
    at: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The stream is over for the client. `finish` is the reason it was given; None: an error or patience at its end.

    `text`: all that it was shown.
    """

    stream: str
    at: float
    finish: str | None
    detail: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The client hung up on purpose: nothing more is owed to it."""

    stream: str
    at: float


ClientEvent = Invoked | Received | Broken | Ended | Left

# ---- written by the store ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A claim raised the request's epoch."""

    request_id: str
    epoch: int
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A row entered the record. `owner` is who sent it, as far as the log tells (empty: it does not)."""

    request_id: str
    epoch: int
    version: int
    tokens: tuple[int, ...]
    owner: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FellBack:
    """Another store goes on, in which the record is here. `promised`: nothing that was shown may be missing from it."""

    request_id: str
    epoch: int
    version: int
    promised: bool


StoreEvent = Claimed | Committed | FellBack

# ---- the whole ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """One run. `held_before` and `held_after` count what is held when idle: pages, sequences, keys, tasks, by name.

    `met` counts what the faults led to (answers DUP and FENCED, replays, refused drafts ...): it proves that the run
    was no walk in the park, and is not judged.
    """

    clients: tuple[ClientEvent, ...]
    store: tuple[StoreEvent, ...]
    held_before: Mapping[str, int] = field(default_factory=dict)
    held_after: Mapping[str, int] = field(default_factory=dict)
    met: Mapping[str, int] = field(default_factory=dict)
