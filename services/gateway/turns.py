"""Requests that open take turns with everything else: hundreds that come at once do not hold up the rows of others."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send


class Turns:
    """Lets one request a pass of the event loop into the application, in the order of arrival.

    Reading a body, checking it and planning a generation is a millisecond without a pause: of a burst, every pass would
    do all there are before it looks at what coordinators have sent.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False  # in this pass, or by who waits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            await self._turn()
        await self._app(scope, receive, send)

    async def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._next)
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        while self._waiting:
            if not (turn := self._waiting.popleft()).done():  # else whoever waited has left
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._is_taken = False
