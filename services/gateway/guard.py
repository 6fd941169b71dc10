"""What every request passes first: an id, the API key, a bound on the body. Plain ASGI, so streams are not buffered."""

from __future__ import annotations

import hmac
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from seqmtp_serve.errors import InvalidField
from services.gateway.problems import problem_response, unauthorized

MAX_BODY_BYTES = 8 * 2**20
REQUEST_ID = "x-request-id"
_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestIds:
    """Gives back the caller's X-Request-Id, or a new one. It is a label for logs: generations have ids of their own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        await self._app(scope, receive, with_id)


class ApiKey:
    """Asks for `Authorization: Bearer KEY` on paths under /v1. Without a key in the settings the API is open."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._passes(scope):
            await unauthorized()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _passes(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if self._key is None or scope["method"] == "OPTIONS" or not (path == "/v1" or path.startswith("/v1/")):
            return True
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode("latin-1"), self._key)


class BodyLimit:
    """Refuses a body over the bound, as declared or as received."""

    def __init__(self, app: ASGIApp, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        declared = Headers(scope=scope).get("content-length", "") if scope["type"] == "http" else ""
        if declared.isdigit() and int(declared) > self._max_bytes:
            await problem_response(self._error())(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                raise self._error()
            return message

        await self._app(scope, counted, send)

    def _error(self) -> InvalidField:
        return InvalidField(f"The body is larger than {self._max_bytes} bytes.")
