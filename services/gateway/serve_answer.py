"""A job's deltas as an HTTP response: whole or streamed, watched for a client that leaves.

Nothing is sent before the first committed row (or its absence) is known, so that a refusal is a status, not an event
inside a stream that began with 200.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from seqmtp_serve.tasks import end_tasks
from services.gateway.answer import event_stream, whole_answer
from services.gateway.choice import Delta
from services.gateway.cursor import Cursor
from services.gateway.guard import charged
from services.gateway.job import Job
from services.gateway.shapes import Shape
from services.gateway.spans import span_of, traced

Result = TypeVar("Result")
CLIENT_LEFT = 499  # for logs: nobody reads it
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream(StreamingResponse):
    """A stream whose source is closed when the response is over, however it ended.

    `source` is closed by itself too: a generator that was never started does not close what it was given.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], source: AsyncGenerator[Delta, None]) -> None:
        super().__init__(events, headers=STREAM_HEADERS, media_type="text/event-stream")
        self._events, self._source = events, source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._source), contextlib.aclosing(self._events):
            with contextlib.suppress(ClientDisconnect):
                await super().__call__(scope, receive, send)


async def serve_answer(
    http: Request, job: Job, shape: Shape, deltas: AsyncGenerator[Delta, None], after: Cursor | None = None
) -> Response:
    """The response to a job; a stream begins after the cursor. Raises typed errors only before anything was sent."""
    return await serve(
        http,
        job.stream,
        accounted(http, job, deltas) if after is None else deltas,  # read again: counted before
        whole=lambda source: whole_answer(job, shape, source),
        events=lambda source: event_stream(job, shape, source, after),
    )


def accounted(http: Request, job: Job, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
    """The same deltas: what they hold goes into the request's span and is taken from its key's allowance."""
    return charged(http.scope, job, traced(span_of(http.scope), job, deltas))


async def serve(
    http: Request,
    stream: bool,
    deltas: AsyncGenerator[Delta, None],
    *,
    whole: Callable[[AsyncGenerator[Delta, None]], Coroutine[Any, Any, dict[str, Any]]],
    events: Callable[[AsyncGenerator[Delta, None]], AsyncGenerator[bytes, None]],
) -> Response:
    """The same in any dialect: `whole` makes the body, `events` the stream."""
    try:
        if not stream:
            body = await _unless_disconnected(http, whole(deltas))
            return Response(status_code=CLIENT_LEFT) if body is None else JSONResponse(body)
        first = await _unless_disconnected(http, _first(deltas))
    except BaseException:
        await deltas.aclose()
        raise
    if first is None:
        await deltas.aclose()
        return Response(status_code=CLIENT_LEFT)
    return EventStream(events(_chained(first, deltas)), deltas)


async def _first(deltas: AsyncGenerator[Delta, None]) -> Delta:
    return await anext(deltas)


async def _chained(first: Delta, rest: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
    async with contextlib.aclosing(rest):
        yield first
        async for delta in rest:
            yield delta


async def _unless_disconnected(http: Request, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of `work`, or None, with `work` cancelled, if the client went first."""
    job = asyncio.create_task(work)
    leave = asyncio.create_task(_disconnected(http))
    try:
        await asyncio.wait({job, leave}, return_when=asyncio.FIRST_COMPLETED)
        return job.result() if job.done() else None
    finally:
        await end_tasks(job, leave)


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
