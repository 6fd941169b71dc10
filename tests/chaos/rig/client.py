"""An HTTP client that wants one text, writes down all it gets, and asks again wherever it was when a connection breaks.

It repeats its POST with the same `Idempotency-Key` and the last event's id, at the next gateway in turn.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from time import monotonic
from typing import Any

import httpx

from tests.chaos.history import Broken, ClientEvent, Ended, Invoked, Left, Received
from tests.chaos.rig.requests import Wish

PATIENCE_S = 60.0
SILENCE_S = 20.0  # a stream that says nothing for so long is given up, and asked for again
AGAIN_S = 0.1


class Refused(Exception):
    """The service said, in words, why there is no (more) stream here."""


class StreamClient:
    """One stream. `rows` are its events so far; `events()` its part of the history."""

    def __init__(
        self,
        name: str,
        wish: Wish,
        gateways: Sequence[str],
        http: httpx.AsyncClient,
        rng: Random,
        *,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.name, self._wish, self._gateways, self._http = name, wish, gateways, http
        self._silence_s = silence_s
        self._turn = rng.randrange(len(gateways))
        self._key = f"{name}-{rng.getrandbits(64):x}"
        self.began_at = monotonic()
        self.rows: list[Received] = []
        self.resumes_s: list[float] = []  # from asking again to the next row
        self._others: list[ClientEvent] = []
        self._event_id: str | None = None
        self._request_id = ""
        self._asked_again_at: float | None = None
        self.is_over = False

    @property
    def request_id(self) -> str:
        """As the service told it; empty before."""
        return self._request_id

    async def run(self, log_len: Callable[[], int], leave_after: int | None = None) -> None:
        """Until the text is complete, patience ends, or `leave_after` rows have come."""
        give_up_at, reason = monotonic() + PATIENCE_S, ""
        while not self.is_over:
            try:
                await self._read(log_len, leave_after)
                reason = "the stream ended early"
            except (httpx.HTTPError, Refused) as error:
                reason = f"{type(error).__name__}: {error}"
            if self.is_over:
                break
            if monotonic() > give_up_at:
                self._end(None, f"patience is over; the last was {reason}")
                break
            self._others.append(Broken(stream=self.name, at=monotonic(), reason=reason))
            self._turn += 1
            await asyncio.sleep(AGAIN_S)

    def events(self) -> tuple[ClientEvent, ...]:
        """What happened, in order."""
        invoked = Invoked(
            stream=self.name, request_id=self._request_id, at=self.began_at, reference=self._wish.reference
        )
        rest: list[ClientEvent] = [*self.rows, *self._others]
        if not self.is_over:
            rest.append(Ended(stream=self.name, at=monotonic(), finish=None, detail="the run ended first"))
        return (invoked, *sorted(rest, key=lambda event: event.at))

    def silence_s(self, fault_at: float) -> float | None:
        """The longest wait for a row after a fault. None when the stream was over, or had not begun, at that moment.

        Rows that were on their way already come at once, so the first row after a fault says little.
        """
        after = [row.at for row in self.rows if row.at > fault_at]
        if len(after) == len(self.rows) or not after:
            return None
        return max(later - earlier for earlier, later in pairwise([fault_at, *after]))

    async def _read(self, log_len: Callable[[], int], leave_after: int | None) -> None:
        headers = {"Idempotency-Key": self._key}
        if self._event_id is not None:
            headers["Last-Event-ID"] = self._event_id
            self._asked_again_at = monotonic()
        url = f"{self._gateways[self._turn % len(self._gateways)]}/v1/completions"
        timeout = httpx.Timeout(self._silence_s, connect=min(self._silence_s, 2.0))
        async with self._http.stream("POST", url, json=self._wish.body, headers=headers, timeout=timeout) as answer:
            if answer.status_code != 200:
                raise Refused(f"{answer.status_code} {(await answer.aread())[:300]!r}")
            async for line in answer.aiter_lines():
                if line.startswith("id: "):
                    self._saw_id(line[4:])
                elif line.startswith("data: ") and line != "data: [DONE]":
                    self._saw(json.loads(line[6:]), log_len)
                if leave_after is not None and len(self.rows) >= leave_after and not self.is_over:
                    self._others.append(Left(stream=self.name, at=monotonic()))
                    self.is_over = True
                    return
                if self.is_over:
                    return

    def _saw_id(self, event_id: str) -> None:
        request_id = event_id.partition(":")[0]
        if self.rows and request_id != self._request_id:
            self._end(None, f"asked for {self._request_id} again, and got {request_id}")
            return
        self._request_id, self._event_id = request_id, event_id

    def _saw(self, chunk: dict[str, Any], log_len: Callable[[], int]) -> None:
        if "error" in chunk:
            raise Refused(str(chunk["error"])[:300])
        row = chunk.get("seqmtp")
        if row is not None and row["version"] > (self.rows[-1].version if self.rows else 0):
            at = monotonic()
            if self._asked_again_at is not None:
                self.resumes_s.append(at - self._asked_again_at)
                self._asked_again_at = None
            self.rows.append(
                Received(
                    stream=self.name,
                    version=row["version"],
                    tokens=tuple(row["tokens"]),
                    at=at,
                    log_len=log_len(),
                )
            )
        for choice in chunk["choices"]:
            if choice["finish_reason"] is not None:
                self._end(choice["finish_reason"], "")

    def _end(self, finish: str | None, detail: str) -> None:
        self._others.append(Ended(stream=self.name, at=monotonic(), finish=finish, detail=detail))
        self.is_over = True
