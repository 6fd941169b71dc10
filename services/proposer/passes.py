"""Which waiting frames make up the next pass of the proposer. Pure: no threads, no IO.

Frames that arrive while a pass runs are batched into the next one, over all target groups. A pass takes at most one
feed of each sequence (rows of one sequence must be computed in order) and closes sequences before it feeds any, so a
close that follows a feed of the same sequence waits for the pass after it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from seqmtp_serve.ports import FeedRows
from seqmtp_serve.request import Ref

MAX_PASS_ROWS = 512  # a pass longer than this keeps short feeds waiting behind long prompts
SEPARATOR = "\x1f"


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """Rows for one sequence, already renamed into its stream's own namespace."""

    rows: FeedRows

    @property
    def sequence(self) -> str:
        return self.rows.ref.request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """Forget one sequence."""

    sequence: str


def take_pass(waiting: deque[Feed | Close], max_rows: int = MAX_PASS_ROWS) -> tuple[list[FeedRows], list[str]]:
    """Remove the next pass from `waiting`: (feeds, sequences to close first). What must wait stays, in order."""
    feeds: list[FeedRows] = []
    closed: list[str] = []
    later: deque[Feed | Close] = deque()
    taken: set[str] = set()  # sequences with an item in this pass' feeds, or held back: all else of theirs waits
    num_rows = 0
    for item in waiting:
        if item.sequence in taken:
            later.append(item)
        elif isinstance(item, Close):
            closed.append(item.sequence)
        elif feeds and num_rows + len(item.rows.next_ids) > max_rows:
            taken.add(item.sequence)
            later.append(item)
        else:
            taken.add(item.sequence)
            feeds.append(item.rows)
            num_rows += len(item.rows.next_ids)
    waiting.clear()
    waiting.extend(later)
    return feeds, closed


def into_namespace(stream: str, request_id: str) -> str:
    """The proposer's own name for a sequence: two target groups may hold one request for a moment (a replay)."""
    return f"{stream}{SEPARATOR}{request_id}"


def renamed(rows: FeedRows, stream: str) -> FeedRows:
    """The feed under its stream's namespace."""
    return replace(rows, ref=replace(rows.ref, request_id=into_namespace(stream, rows.ref.request_id)))


def original(ref: Ref) -> tuple[str, Ref]:
    """(stream, the reference as the target wrote it)."""
    stream, _, request_id = ref.request_id.partition(SEPARATOR)
    return stream, replace(ref, request_id=request_id)
