"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from seqmtp_serve.errors import IdempotencyConflict, InvalidField, RequestNotFound
from seqmtp_serve.live_requests import CALLER, PRIORITY
from services.gateway.body import GenerationBody
from services.gateway.chat_body import ChatBody
from services.gateway.completion_body import CompletionBody
from services.gateway.cursor import HEADER, parse_cursor
from services.gateway.gateway import Gateway
from services.gateway.guard import ALLOWANCE
from services.gateway.job import Job
from services.gateway.letterhead import unpack_letterhead
from services.gateway.openapi import answers
from services.gateway.refused import judge_extras
from services.gateway.room import Room
from services.gateway.routes_resume import serve_resumed
from services.gateway.serve_answer import serve_answer
from services.gateway.shapes import ChatShape, CompletionShape, Shape
from services.gateway.spans import traceparent_for

MAX_LABEL_LEN = 512
MAX_METADATA_LEN = 16_384  # OpenAI allows 16 pairs of 64 and 512 characters
KEY = "Idempotency-Key"
_KEY = re.compile(r"[\x21-\x7e]{1,255}")


def generation_routes(gateway: Gateway) -> APIRouter:
    """The two routes over one gateway."""
    routes = APIRouter(tags=["generation"])

    @routes.post("/v1/chat/completions", responses=answers("chat.completion.chunk"), response_class=Response)
    async def chat(body: ChatBody, http: Request) -> Response:
        """Answer a conversation."""
        judge_extras(body.model_extra or {})
        status = await gateway.board.check_model(body.model)
        messages = [message.to_template(position) for position, message in enumerate(body.messages)]
        tools = body.tool_use
        room, more = Room(status.max_model_len, "messages"), body.chat_template_kwargs
        prompt = await gateway.text.encode_chat(messages, tools=tools.told, more=more, room=room)
        shape = ChatShape()
        key = idempotency_key(http)
        predicted = body.prediction.text if body.prediction else ""
        job = await gateway.plan(
            body,
            [prompt],
            status,
            shape.prefix,
            prompt_field="messages",
            budget=body.budget,
            key=key,
            prediction_ids=await gateway.text.encode(predicted, add_special_tokens=False),
            tools=tools,
            is_chat=True,
        )
        return await answer(gateway, http, job, shape, labels(body, http), keyed=key is not None)

    @routes.post("/v1/completions", responses=answers("text_completion"), response_class=Response)
    async def completions(body: CompletionBody, http: Request) -> Response:
        """Continue one or several texts."""
        judge_extras(body.model_extra or {})
        status = await gateway.board.check_model(body.model)
        room = Room(status.max_model_len, "prompt")
        prompts = [
            await gateway.text.encode(prompt, add_special_tokens=body.add_special_tokens is not False, room=room)
            if isinstance(prompt, str)
            else gateway.text.check_ids(prompt, "prompt", room)
            for prompt in body.prompts
        ]
        shape = CompletionShape()
        key = idempotency_key(http)
        job = await gateway.plan(
            body, prompts, status, shape.prefix, prompt_field="prompt", budget=body.budget, key=key
        )
        return await answer(gateway, http, job, shape, labels(body, http), keyed=key is not None)

    return routes


async def answer(
    gateway: Gateway, http: Request, job: Job, shape: Shape, meta: Mapping[str, str], *, keyed: bool
) -> Response:
    """Start the job, or find it by its key, and answer: whole, as a stream, or (in the background) with its status."""
    if HEADER in http.headers:
        return await resume(gateway, http, job, shape)
    if not keyed and not job.background and len(job.choices) == 1:
        return await serve_answer(http, job, shape, gateway.generate(job, meta))
    records = await gateway.start(job, meta)
    told = unpack_letterhead(records)  # of the first time, when this is not
    job = replace(job, id=told.id, created=told.created, model=told.model, choices=told.choices)
    job = replace(job, num_prompt_tokens=told.num_prompt_tokens, system_fingerprint=told.system_fingerprint)
    if job.background and not job.stream:
        return JSONResponse(gateway.as_it_is(job, shape, records))
    return await serve_answer(http, job, shape, gateway.measures.watch(job, gateway.deltas(job)))


async def resume(gateway: Gateway, http: Request, asked: Job, shape: Shape) -> Response:
    """Go on with the stream that the event id names, as clients do that repeat their POST; nothing is started."""
    cursor = parse_cursor(http.headers[HEADER])
    try:
        records = await gateway.find(cursor.job_id)
    except RequestNotFound:
        problem = f"There is no answer '{cursor.job_id}' here, or its replay window has passed."
        raise RequestNotFound(problem, param=HEADER) from None
    job = unpack_letterhead(records)
    if job.body_digest != asked.body_digest:
        raise IdempotencyConflict(f"'{HEADER}' names an answer to another body.", param=HEADER)
    return await serve_resumed(gateway, http, job, shape, cursor)


def idempotency_key(http: Request) -> str | None:
    """The caller's key, if there is one. Raises InvalidField."""
    key = http.headers.get(KEY)
    if key is not None and not _KEY.fullmatch(key):
        raise InvalidField(f"'{KEY}' must be 1 to 255 visible ASCII characters.", param=KEY)
    return key


def labels(body: GenerationBody, http: Request) -> Mapping[str, str]:
    """What is kept with the request's record for whoever reads it: the caller's labels and the trace it belongs to.

    Raises InvalidField for `metadata` that is too large to keep.
    """
    metadata = json.dumps(body.metadata, ensure_ascii=False) if body.metadata else None
    if metadata and len(metadata) > MAX_METADATA_LEN:
        raise InvalidField(f"'metadata' may have {MAX_METADATA_LEN} characters as JSON.", param="metadata")
    found = {
        "http_request_id": http.scope.get("state", {}).get("request_id"),
        "caller_request_id": body.request_id,
        CALLER: None if (allowance := http.scope.get("state", {}).get(ALLOWANCE)) is None else allowance.key.name,
        PRIORITY: None if body.priority is None else str(body.priority),
        "traceparent": traceparent_for(http.scope, http.headers.get("traceparent")),
        "user": body.user,
    }
    kept = {name: value[:MAX_LABEL_LEN] for name, value in found.items() if value}
    return kept | ({"metadata": metadata} if metadata else {})
