"""What the OpenAPI page says beyond FastAPI's own guess: our error shape, real statuses, streams; never a 422."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel


class Problem(BaseModel):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: Problem


class Answer(BaseModel):
    """What both generation routes answer. `choices` have OpenAI's shape, with vLLM's `stop_reason`."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[dict[str, Any]]
    usage: dict[str, Any]
    metrics: dict[str, Any]


class ResponseObject(BaseModel):
    """What /v1/responses answers: OpenAI's response object; `metrics` once it is over."""

    id: str
    object: str
    created_at: float
    status: str
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None


_SENTENCES = {
    400: "A field is malformed, out of range or not supported (`param` names it), or the context is too small.",
    401: "The API key is missing or wrong.",
    404: "The model, the answer or the route does not exist.",
    409: "The answer was cancelled, its Idempotency-Key was used for another body, or its record is behind the cursor.",
    429: "This key's own limit a minute is used up: come back after `Retry-After` seconds.",
    500: "An invariant of the server broke; the request ended.",
    503: "The service is full or not ready: come back after `Retry-After` seconds.",
}


_EVENT = {
    "type": "object",
    "description": "One server-sent event. `data` is a JSON object, but for the last: [DONE].",
    "properties": {"id": {"type": "string"}, "event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["id", "data"],
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """`responses=` for a route that can fail so."""
    return {status: {"model": ErrorBody, "description": _SENTENCES[status]} for status in statuses}


def answers(example_chunk: str, body: type[BaseModel] = Answer) -> dict[int | str, dict[str, Any]]:
    """`responses=` for a generation route: a JSON body, or server-sent events."""
    stream = {"schema": _EVENT, "example": f'id: REQUEST:1\ndata: {{"object":"{example_chunk}",…}}\n\n'}
    content = {"application/json": {"schema": body.model_json_schema()}, "text/event-stream": stream}
    done = {"description": "The answer; a stream if `stream` is set.", "content": content}
    nothing = {"description": "Nothing follows the event that `Last-Event-ID` names."}
    return {200: done, 204: nothing, **problems(400, 401, 404, 409, 429, 500, 503)}


def without_422(app: FastAPI) -> None:
    """Take FastAPI's 422 out of the document: here a body that fails validation is a 400."""
    generated = app.openapi

    def openapi() -> dict[str, Any]:
        document = generated()
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # the way that FastAPI documents
