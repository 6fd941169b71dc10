"""POST /v1/responses, GET /v1/responses/{id}, POST …/cancel: OpenAI's newer route, without state between responses.

A response is an answer like any other: its record outlives every worker, and is read again for the replay window.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from seqmtp_serve.errors import IdempotencyConflict, RequestNotFound, StoreBehind
from seqmtp_serve.ports import Snapshot
from services.gateway.choice import Delta
from services.gateway.cursor import HEADER
from services.gateway.gateway import Gateway
from services.gateway.job import Job
from services.gateway.letterhead import unpack_letterhead
from services.gateway.openapi import ResponseObject, answers
from services.gateway.refused import REFUSED as REFUSED_EVERYWHERE
from services.gateway.refused import judge_extras
from services.gateway.response_item_stream import last_number
from services.gateway.response_object import PREFIX, has_items
from services.gateway.response_stream import NUM_ENDING, NUM_OPENING, Seen, response_events, seen_of
from services.gateway.responses_body import REFUSED, ResponsesBody
from services.gateway.room import Room
from services.gateway.routes_generate import idempotency_key, labels
from services.gateway.serve_answer import accounted, serve
from services.gateway.whole_response import response_as_it_is, whole_response

Flag = Annotated[bool | None, Query(description="Answer with server-sent events.")]
After = Annotated[int | None, Query(ge=0, description="Stream what follows this `sequence_number`.")]


def response_routes(gateway: Gateway) -> APIRouter:
    """The routes over one gateway."""
    routes = APIRouter(tags=["responses"])

    @routes.post("/v1/responses", responses=answers("response", ResponseObject), response_class=Response)
    async def create(body: ResponsesBody, http: Request) -> Response:
        """Answer an input, whole, as typed events, or in the background."""
        judge_extras(body.model_extra or {}, {**REFUSED_EVERYWHERE, **REFUSED})
        body.check()
        status = await gateway.board.check_model(body.model)
        tools = body.tool_use
        room, more = Room(status.max_model_len, "input"), body.chat_template_kwargs
        prompt = await gateway.text.encode_chat(body.messages, tools=tools.told, more=more, room=room)
        key = idempotency_key(http)
        job = await gateway.plan(
            body,
            [prompt],
            status,
            PREFIX,
            prompt_field="input",
            budget=body.budget,
            key=key,
            tools=tools,
            is_chat=True,
        )
        job = replace(job, told=body.told)
        if (event_id := http.headers.get(HEADER)) is not None:
            return await _resume(gateway, http, job, event_id)
        meta = labels(body, http)
        if key is None and not job.background:
            return await _serve(http, job, gateway.generate(job, meta))
        records = await gateway.start(job, meta)
        job = replace(unpack_letterhead(records), stream=job.stream)  # of the first time, when this is not
        if job.background and not job.stream:
            return _as_it_is(gateway, job, records[0])
        return await _serve(http, job, gateway.measures.watch(job, gateway.deltas(job)))

    @routes.get("/v1/responses/{id}", responses=answers("response", ResponseObject), response_class=Response)
    async def read(id: str, http: Request, stream: Flag = None, starting_after: After = None) -> Response:
        """A response as it is now, or its events from where the client was."""
        job, record = await _find(gateway, id)
        event_id = http.headers.get(HEADER)
        if not (stream or event_id or starting_after is not None):
            return _as_it_is(gateway, job, record)
        seen = None if event_id is None else seen_of(event_id, id)
        if seen is None and starting_after is not None:
            seen = _seen_number(starting_after, job, record)
        gateway.measures.resumed.labels(job.model).inc()
        return await _serve(http, job, gateway.deltas(job), seen)

    @routes.post("/v1/responses/{id}/cancel", responses=answers("response", ResponseObject), response_class=Response)
    async def cancel(id: str) -> Response:
        """End the response; what was committed of it stays readable."""
        _, record = await _find(gateway, id)
        await gateway.cancel([record.request.request_id])
        job, record = await _find(gateway, id)
        return _as_it_is(gateway, job, record)

    return routes


def _as_it_is(gateway: Gateway, job: Job, record: Snapshot) -> Response:
    return JSONResponse(response_as_it_is(job, record, gateway.choice_text(job, record.request)))


async def _resume(gateway: Gateway, http: Request, asked: Job, event_id: str) -> Response:
    """Go on with the stream that the event id names, as clients do that repeat their POST; nothing is started."""
    seen = seen_of(event_id, event_id.partition(":")[0])
    job, _ = await _find(gateway, event_id.partition(":")[0])
    if job.body_digest != asked.body_digest:
        raise IdempotencyConflict(f"'{HEADER}' names a response to another body.", param=HEADER)
    gateway.measures.resumed.labels(job.model).inc()
    return await _serve(http, job, gateway.deltas(job), seen)


async def _serve(http: Request, job: Job, deltas: AsyncGenerator[Delta, None], seen: Seen | None = None) -> Response:
    return await serve(
        http,
        job.stream,
        accounted(http, job, deltas) if seen is None else deltas,
        whole=lambda source: whole_response(job, source),
        events=lambda source: response_events(job, source, seen),
    )


def _seen_number(number: int, job: Job, record: Snapshot) -> Seen:
    """Raises StoreBehind for a number that the record has not come to."""
    if has_items(job):
        num_tokens = sum(len(row.tokens) for row in record.rows)
        last = last_number(num_tokens, ended=record.finish is not None)
    else:
        last = NUM_OPENING - 1 + record.version + (NUM_ENDING if record.finish is not None else 0)
    if number > max(last, NUM_OPENING - 1):
        problem = f"The record is at event {last}: the store lost what followed, or you never had {number}."
        raise StoreBehind(problem)
    return Seen(number=number)


async def _find(gateway: Gateway, id: str) -> tuple[Job, Snapshot]:
    """Raises RequestNotFound, also for an answer of another route."""
    problem = f"There is no response '{id[:128]}' here, or its replay window has passed."
    if not id.startswith(f"{PREFIX}-"):
        raise RequestNotFound(problem, param="id")
    try:
        records = await gateway.find(id)
    except RequestNotFound:
        raise RequestNotFound(problem, param="id") from None
    return unpack_letterhead(records), records[0]
