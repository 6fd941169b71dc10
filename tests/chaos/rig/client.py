"""An HTTP client that wants one answer, writes down all it gets, and goes on where it was when a connection breaks.

It asks the next gateway in turn from the last event's id: half of the clients repeat their POST with the same
`Idempotency-Key`, half read the answer by its name.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from random import Random
from time import monotonic
from typing import Any

import httpx

from services.gateway.letterhead import choice_ids
from tests.chaos.history import Broken, ClientEvent
from tests.chaos.rig.choice import ChoiceStream
from tests.chaos.rig.requests import Wish

PATIENCE_S = 60.0
SILENCE_S = 20.0  # a stream that says nothing for so long is given up, and asked for again
AGAIN_S = 0.1


class Refused(Exception):
    """The service said, in words, why there is no (more) stream here."""


class StreamClient:
    """One answer. `choices` are its streams so far; `events()` its part of the history."""

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
        self._repeats_its_post = rng.random() < 0.5
        self.choices = [
            ChoiceStream(choice_name, reference, monotonic())
            for choice_name, reference in zip(choice_ids(name, len(wish.references)), wish.references, strict=True)
        ]
        self.resumes_s: list[float] = []  # from asking again to the next row
        self.breaks: list[Broken] = []
        self._answer_id = ""
        self._event_id: str | None = None
        self._asked_again_at: float | None = None
        self.is_over = False

    @property
    def num_rows(self) -> int:
        """Rows so far, of all choices."""
        return sum(len(choice.rows) for choice in self.choices)

    async def run(self, log_len: Callable[[], int], leave_after: int | None = None) -> None:
        """Until the answer is complete, patience ends, or `leave_after` rows have come."""
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
                self._give_up(f"patience is over; the last was {reason}")
                break
            self.breaks.append(Broken(stream=self.choices[0].name, at=monotonic(), reason=reason))
            self._turn += 1
            await asyncio.sleep(AGAIN_S)

    def events(self) -> tuple[ClientEvent, ...]:
        """What happened, choice by choice, each in order."""
        now = monotonic()
        return tuple(event for choice in self.choices for event in choice.events(now))

    async def _read(self, log_len: Callable[[], int], leave_after: int | None) -> None:
        timeout = httpx.Timeout(self._silence_s, connect=min(self._silence_s, 2.0))
        async with self._http.stream(**self._question(), timeout=timeout) as answer:
            if answer.status_code != 200:
                raise Refused(f"{answer.status_code} {(await answer.aread())[:300]!r}")
            async for line in answer.aiter_lines():
                if line.startswith("id: "):
                    self._saw_id(line[4:])
                elif line == "data: [DONE]":
                    self._done()
                elif line.startswith("data: "):
                    self._saw(json.loads(line[6:]), log_len)
                if leave_after is not None and self.num_rows >= leave_after and not self.is_over:
                    self._leave()
                if self.is_over:
                    return

    def _question(self) -> dict[str, Any]:
        url = f"{self._gateways[self._turn % len(self._gateways)]}/v1/completions"
        headers = {"Idempotency-Key": self._key}
        if self._event_id is not None:
            headers["Last-Event-ID"] = self._event_id
            self._asked_again_at = monotonic()
            if not self._repeats_its_post:
                return {"method": "GET", "url": f"{url}/{self._answer_id}", "headers": headers}
        return {"method": "POST", "url": url, "json": self._wish.body, "headers": headers}

    def _saw_id(self, event_id: str) -> None:
        answer_id = event_id.partition(":")[0]
        if self._answer_id and answer_id != self._answer_id:
            self._give_up(f"asked for {self._answer_id} again, and got {answer_id}")
            return
        self._answer_id, self._event_id = answer_id, event_id
        for choice, request_id in zip(self.choices, choice_ids(answer_id, len(self.choices)), strict=True):
            choice.request_id = request_id

    def _saw(self, chunk: dict[str, Any], log_len: Callable[[], int]) -> None:
        if "error" in chunk:
            raise Refused(str(chunk["error"])[:300])
        row, at = chunk.get("seqmtp"), monotonic()
        if row is not None and self._asked_again_at is not None:
            self.resumes_s.append(at - self._asked_again_at)
            self._asked_again_at = None
        for part in chunk["choices"]:
            self.choices[part["index"]].saw(row, part, at, log_len())

    def _done(self) -> None:
        self._give_up("the answer was said to be done before it was")
        self.is_over = True

    def _leave(self) -> None:
        for choice in self.choices:
            choice.leave(monotonic())
        self.is_over = True

    def _give_up(self, why: str) -> None:
        for choice in self.choices:
            if not choice.is_over:
                choice.end(None, why, monotonic())
        self.is_over = True
