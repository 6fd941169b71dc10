"""One choice of an answer as a client sees it: rows, text and end. The checker takes it for one stream."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from tests.chaos.history import ClientEvent, Ended, Invoked, Left, Received
from tests.chaos.rig.requests import Reference


class ChoiceStream:
    """Grows event by event. Nothing that comes is passed over: what came twice is in it twice."""

    def __init__(self, name: str, reference: Reference, began_at: float) -> None:
        self.name, self._reference, self._began_at = name, reference, began_at
        self.request_id = ""  # as the service told it
        self.rows: list[Received] = []
        self._texts: list[str] = []
        self._end: Ended | Left | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more is expected."""
        return self._end is not None

    def saw(self, row: dict[str, Any] | None, choice: dict[str, Any], at: float, log_len: int) -> None:
        """One event's part for this choice; `row` is the trace of a row with tokens that are new."""
        if row is not None:
            version, tokens = row["version"], tuple(row["tokens"])
            self.rows.append(Received(stream=self.name, version=version, tokens=tokens, at=at, log_len=log_len))
        self._texts.append(choice["text"])
        if choice["finish_reason"] is not None and self._end is None:
            self.end(choice["finish_reason"], "", at)

    def end(self, finish: str | None, detail: str, at: float) -> None:
        """It is over, well or not."""
        text = "".join(self._texts)
        self._end = Ended(stream=self.name, at=at, finish=finish, detail=detail, text=text)

    def leave(self, at: float) -> None:
        """The client hangs up."""
        self._end = self._end or Left(stream=self.name, at=at)

    def events(self, now: float) -> tuple[ClientEvent, ...]:
        """What happened, in order."""
        invoked = Invoked(
            stream=self.name,
            request_id=self.request_id,
            at=self._began_at,
            reference=self._reference.tokens,
            text=self._reference.text,
            finish=self._reference.finish,
        )
        end = self._end or Ended(stream=self.name, at=now, finish=None, detail="the run ended first")
        return (invoked, *sorted([*self.rows, end], key=lambda event: event.at))

    def silence_s(self, fault_at: float) -> float | None:
        """The longest wait for a row after a fault. None when the stream was over, or had not begun, at that moment.

        Rows that were on their way already come at once, so the first row after a fault says little.
        """
        after = [row.at for row in self.rows if row.at > fault_at]
        if len(after) == len(self.rows) or not after:
            return None
        return max(later - earlier for earlier, later in pairwise([fault_at, *after]))
