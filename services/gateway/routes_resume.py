"""Answers that exist: GET reads one again, whole or as a stream from where a client was; POST …/cancel ends it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from seqmtp_serve.errors import InvalidField, RequestNotFound, StoreBehind
from seqmtp_serve.ports import Snapshot
from services.gateway.cursor import HEADER, Cursor, cursor_after, parse_cursor
from services.gateway.gateway import Gateway
from services.gateway.job import Job
from services.gateway.letterhead import unpack_letterhead
from services.gateway.openapi import answers
from services.gateway.serve_answer import serve_answer
from services.gateway.shapes import ChatShape, CompletionShape, Shape

Flag = Annotated[bool | None, Query(description="Answer with server-sent events.")]
After = Annotated[
    str | None,
    Query(
        pattern=r"^\d{1,9}(,\d{1,9})*$",
        description="Stream what follows this `sequence_number`; of several choices, one for each: `4,7,0`.",
    ),
]


def resume_routes(gateway: Gateway) -> APIRouter:
    """The routes over one gateway."""
    routes = APIRouter(tags=["answers"])

    @routes.get("/v1/chat/completions/{id}", responses=answers("chat.completion.chunk"), response_class=Response)
    async def chat(id: str, http: Request, stream: Flag = None, starting_after: After = None) -> Response:
        """A conversation's answer as it is now, or its stream from where the client was."""
        return await _read(gateway, http, id, ChatShape(), stream, starting_after)

    @routes.get("/v1/completions/{id}", responses=answers("text_completion"), response_class=Response)
    async def completion(id: str, http: Request, stream: Flag = None, starting_after: After = None) -> Response:
        """A completion as it is now, or its stream from where the client was."""
        return await _read(gateway, http, id, CompletionShape(), stream, starting_after)

    @routes.post("/v1/chat/completions/{id}/cancel", responses=answers("chat.completion"), response_class=Response)
    async def cancel_chat(id: str) -> Response:
        """End the answer; what was committed of it stays readable."""
        return await _cancel(gateway, id, ChatShape())

    @routes.post("/v1/completions/{id}/cancel", responses=answers("text_completion"), response_class=Response)
    async def cancel_completion(id: str) -> Response:
        """End the completion; what was committed of it stays readable."""
        return await _cancel(gateway, id, CompletionShape())

    return routes


async def serve_resumed(gateway: Gateway, http: Request, job: Job, shape: Shape, after: Cursor | None) -> Response:
    """The stream of a job that exists, from the cursor on. 204 when nothing follows it: EventSource then stops."""
    if after is not None and len(after.positions) != len(job.choices):
        raise InvalidField(f"The answer has {len(job.choices)} choices, the cursor has others.", param=HEADER)
    if after is not None and after.tail == "done":
        return Response(status_code=204)
    gateway.measures.resumed.labels(job.model).inc()
    return await serve_answer(http, job, shape, gateway.deltas(job), after)


async def _read(
    gateway: Gateway, http: Request, id: str, shape: Shape, stream: bool | None, starting_after: str | None
) -> Response:
    records, job = await _find(gateway, id, shape)
    event_id = http.headers.get(HEADER)
    wants_events = "text/event-stream" in http.headers.get("accept", "")
    if not (stream or event_id or starting_after is not None or (wants_events and stream is None)):
        return JSONResponse(gateway.as_it_is(job, shape, records))
    after = None if event_id is None else parse_cursor(event_id)
    if after is not None and after.job_id != id:
        raise InvalidField(f"'{HEADER}' names another answer.", param=HEADER)
    if after is None and starting_after is not None:
        after = _after_versions(id, [int(number) for number in starting_after.split(",")], records)
    return await serve_resumed(gateway, http, job, shape, after)


def _after_versions(id: str, versions: list[int], records: list[Snapshot]) -> Cursor:
    """Raises InvalidField unless there is a number for each choice, and StoreBehind."""
    if versions == [0]:
        versions = [0] * len(records)  # from the beginning, whatever the choices
    if len(versions) != len(records):
        problem = (
            f"Each choice has sequence numbers of its own: give {len(records)}, as in '4,7,0' (0: from its beginning), "
            f"or go on with '{HEADER}'."
        )
        raise InvalidField(problem, param="starting_after")
    for version, record in zip(versions, records, strict=True):
        if version > record.version:
            problem = (
                f"The record is at {record.version}: the store lost what followed, or you never had {version}. "
                f"'{HEADER}' says what you have in a way that can be checked."
            )
            raise StoreBehind(problem)
    return cursor_after(id, versions)


async def _cancel(gateway: Gateway, id: str, shape: Shape) -> Response:
    records, _ = await _find(gateway, id, shape)
    await gateway.cancel([record.request.request_id for record in records])
    records, job = await _find(gateway, id, shape)
    return JSONResponse(gateway.as_it_is(job, shape, records))


async def _find(gateway: Gateway, id: str, shape: Shape) -> tuple[list[Snapshot], Job]:
    """Raises RequestNotFound, also for an answer of the other dialect."""
    if not id.startswith(f"{shape.prefix}-"):
        raise RequestNotFound(f"There is no answer '{id[:128]}' here.", param="id")
    try:
        records = await gateway.find(id)
    except RequestNotFound:
        problem = f"There is no answer '{id[:128]}' here, or its replay window has passed."
        raise RequestNotFound(problem, param="id") from None
    return records, unpack_letterhead(records)
