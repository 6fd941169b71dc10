"""Where drafts arrive and the engine waits for them, never longer than one round is worth.

The engine's thread says what it fed (`expect`) and collects; the event loop puts what arrived. How long a collect may
wait follows the proposer's own pace: four times its median answer, at least 50 ms, at most one second. When that has
run out once, the proposer counts as stalled and nobody waits for it until it answers again: a peer that hangs costs
one round's wait, not one in each round.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from seqmtp_serve.ports import Draft
from seqmtp_serve.request import Ref

FLOOR_S = 0.05
CEILING_S = 1.0
PACE = 4.0  # a wait lasts at most this many median answers
SAMPLES = 33


@dataclass(slots=True)
class _Expected:
    ref: Ref
    since: float  # seconds on the box's clock
    draft: Draft | None = None


class DraftBox:
    """Thread-safe. Holds at most one expected draft for each request: that of its newest feed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._expected: dict[str, _Expected] = {}
        self._pace: deque[float] = deque(maxlen=SAMPLES)
        self._stalled = False
        self.num_timeouts = 0

    @property
    def stalled(self) -> bool:
        """Whether the last wait ran out and nothing has arrived since."""
        return self._stalled

    @property
    def longest_wait_s(self) -> float:
        """What a collect waits at most, now."""
        if not self._pace:
            return CEILING_S
        return min(max(FLOOR_S, PACE * statistics.median(self._pace)), CEILING_S)

    def expect(self, refs: Iterable[Ref]) -> None:
        """Drafts for `refs` were asked for just now; older expectations of the same requests are void."""
        with self._changed:
            for ref in refs:
                self._expected[ref.request_id] = _Expected(ref, self._clock())

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests are over."""
        with self._changed:
            for request_id in request_ids:
                self._expected.pop(request_id, None)

    def put(self, drafts: Iterable[Draft]) -> None:
        """Drafts arrived. Those nobody expects any more only show that the peer is alive."""
        with self._changed:
            self._stalled = False
            for draft in drafts:
                entry = self._expected.get(draft.ref.request_id)
                if entry is not None and entry.ref == draft.ref:
                    entry.draft = draft
                    self._pace.append(self._clock() - entry.since)
            self._changed.notify_all()

    def refuse(self, ref: Ref) -> None:
        """The peer will not answer this feed."""
        with self._changed:
            entry = self._expected.get(ref.request_id)
            if entry is not None and entry.ref == ref:
                del self._expected[ref.request_id]
            self._changed.notify_all()

    def clear(self) -> None:
        """The peer is lost: nothing is expected, whoever waits goes on at once."""
        with self._changed:
            self._expected.clear()
            self._stalled = False
            self._changed.notify_all()

    def collect(self, refs: Sequence[Ref], timeout_s: float) -> dict[str, Draft]:
        """Drafts, by request id, for those of `refs` that were expected and came in time."""
        with self._changed:
            wait_s = 0.0 if self._stalled else min(timeout_s, self.longest_wait_s)
            if not self._changed.wait_for(lambda: not self._missing(refs), wait_s) and not self._stalled:
                self._stalled = True
                self.num_timeouts += 1
            return {ref.request_id: draft for ref in refs if (draft := self._arrived(ref)) is not None}

    def _missing(self, refs: Sequence[Ref]) -> bool:
        return any((entry := self._entry(ref)) is not None and entry.draft is None for ref in refs)

    def _arrived(self, ref: Ref) -> Draft | None:
        entry = self._entry(ref)
        return None if entry is None else entry.draft

    def _entry(self, ref: Ref) -> _Expected | None:
        entry = self._expected.get(ref.request_id)
        return entry if entry is not None and entry.ref == ref else None
