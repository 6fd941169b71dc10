"""Errors as OpenAI's clients read them: `{"error": {message, type, param, code}}` with the status of one table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from seqmtp_serve import errors
from seqmtp_serve.errors import InvalidField, SeqMTPError
from services.rpc.status import http_status

MAX_MESSAGE_LEN = 2000  # a caller's own text may be echoed, never all of it

TYPES: Mapping[type[SeqMTPError], str] = {
    errors.CallerError: "invalid_request_error",
    errors.RateLimited: "rate_limit_error",
    errors.Overloaded: "overloaded",
    errors.Unavailable: "service_unavailable",
    errors.StoreUnreachable: "service_unavailable",
    SeqMTPError: "server_error",
}


def problem_body(error: SeqMTPError) -> dict[str, Any]:
    """The error object."""
    kind = next(TYPES[cls] for cls in type(error).__mro__ if cls in TYPES)
    return _body(str(error), kind, error.code, getattr(error, "param", None))


def problem_response(error: SeqMTPError) -> JSONResponse:
    """The whole response. 503 says when to come back; a failure inside a generation, or a conflict with what is
    recorded, says not to send it again."""
    status = http_status(error)
    headers = {}
    if status in (429, 503):
        headers["Retry-After"] = str(max(1, math.ceil(getattr(error, "retry_after_s", 1.0))))
    if status >= 500 or status == 409:  # clients repeat both by themselves
        headers["x-should-retry"] = "true" if error.retryable else "false"
    return JSONResponse(problem_body(error), status, headers)


def unauthorized() -> JSONResponse:
    """The answer to a missing or wrong key."""
    body = _body(
        "Incorrect API key: send it as 'Authorization: Bearer KEY'.", "authentication_error", "invalid_api_key"
    )
    return JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})


def validation_problem(problems: Sequence[Any]) -> InvalidField:
    """The first of pydantic's complaints, as one sentence about one field."""
    first = problems[0]
    if first["type"] == "json_invalid":
        return InvalidField(f"The body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    param = field_path(first["loc"])
    if param is None and isinstance(first.get("input"), bytes):  # FastAPI reads only what is declared as JSON
        return InvalidField("Say that the body is JSON: send the header 'Content-Type: application/json'.")
    if param is None and first["type"] == "model_attributes_type":
        return InvalidField("The body is JSON, but no object.")
    if first["type"] == "missing":
        return InvalidField(
            f"Missing required parameter: '{param}'." if param else "A JSON body is required.", param=param
        )
    return InvalidField(f"Invalid value for '{param}': {first['msg']}." if param else f"{first['msg']}.", param=param)


def field_path(location: Sequence[str | int]) -> str | None:
    """`('body', 'messages', 0, '~text')` as `messages[0]`: union tags and the word body are pydantic's, not ours."""
    path = ""
    for part in location[1:] if location and location[0] in ("body", "query", "path") else location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("~"):
            path += f".{part}" if path else part
    return path[:256] or None


def install_handlers(app: FastAPI) -> None:
    """Every way a request can fail ends in the same shape."""

    @app.exception_handler(SeqMTPError)
    async def typed(_: Request, error: SeqMTPError) -> JSONResponse:
        return problem_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return problem_response(validation_problem(error.errors()))

    @app.exception_handler(HTTPException)
    async def routed(_: Request, error: HTTPException) -> JSONResponse:
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        return JSONResponse(_body(str(error.detail), kind, None), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def unforeseen(_: Request, error: Exception) -> JSONResponse:
        return problem_response(errors.InternalError(f"An unforeseen {type(error).__name__}; the log has more."))


def _body(message: str, kind: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    shown = message[:MAX_MESSAGE_LEN].encode("utf-8", "replace").decode()
    return {"error": {"message": shown, "type": kind, "param": param, "code": code}}
