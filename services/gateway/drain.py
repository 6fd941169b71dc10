"""How a gateway ends: nothing new, open answers go on for a while, and what is left is told to go on elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from starlette.types import ASGIApp, Receive, Scope, Send

from seqmtp_serve.errors import Draining
from services.gateway.choice import Delta
from services.gateway.problems import problem_response


class Drain:
    """One gateway's end: `begin`, `all_over`, `expire`, in this order. It never goes back."""

    def __init__(self) -> None:
        self.begun = False
        self.num_open = 0  # answers under way
        self._is_expired = False
        self._waits: set[asyncio.Timeout] = set()  # for the next delta of each answer

    def begin(self) -> None:
        """Nothing new from now on."""
        self.begun = True

    def all_over(self) -> bool:
        """Whether no answer is under way."""
        return self.num_open == 0

    def expire(self) -> None:
        """Answers that are still under way end with Draining."""
        self._is_expired = True
        for wait in self._waits:
            wait.reschedule(0.0)

    async def watch(self, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        """The deltas of one answer, which counts as open meanwhile. Raises Draining when the time is over."""
        self.num_open += 1
        try:
            async with contextlib.aclosing(deltas):
                while (delta := await self._unless_expired(deltas)) is not None:
                    yield delta
        finally:
            self.num_open -= 1

    async def _unless_expired(self, deltas: AsyncGenerator[Delta, None]) -> Delta | None:
        """The next delta; None when there is none. No task for it: an answer has one a row."""
        try:
            async with asyncio.timeout(0.0 if self._is_expired else None) as wait:
                self._waits.add(wait)
                try:
                    return await anext(deltas, None)
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            if not wait.expired():
                raise
            raise Draining("This gateway is ending: go on at another one, from the id of this event.") from None


class NothingNew:
    """Answers 503 `draining` to whatever comes under /v1 once the gateway is ending."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app, self._drain = app, drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._drain.begun and scope["path"].startswith("/v1/"):
            error = Draining("This gateway is ending: ask another one, or again in a moment.")
            await problem_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)
