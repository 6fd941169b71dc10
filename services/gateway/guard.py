"""What every request passes first: an id, the API key, a bound on the body. Plain ASGI, so streams are not buffered."""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from seqmtp_serve.errors import InvalidField, RateLimited
from services.gateway.choice import Delta
from services.gateway.job import Job
from services.gateway.keys import KeyRing
from services.gateway.limits import Allowance, Limits
from services.gateway.problems import problem_response, unauthorized

MAX_BODY_BYTES = 8 * 2**20
MAX_BODY_DEPTH = 64
MAX_BRACKETS = 100_000  # outside and inside strings
MAX_VALUES = 2**19  # of lists and objects, all of them together: to read millions would keep every request waiting
REQUEST_ID = "x-request-id"
ALLOWANCE = "allowance"
GUARDED = ("/v1", "/tokenize", "/detokenize", "/tokenizer_info")  # and what is below
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_MARKS = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)  # strings as a whole, or one bracket


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
    """Asks for `Authorization: Bearer KEY` on `GUARDED` paths, and holds each key to its limits. No keys: all is open.

    The key's allowance is in the request's state for whoever counts tokens (`charged`).
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, limits: Limits) -> None:
        self._app, self._keys, self._limits = app, keys, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or not self._keys.keys or not self._is_guarded(path, scope["method"]):
            await self._app(scope, receive, send)
            return
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        key = self._keys.find(token.strip().encode("latin-1")) if scheme.lower() == "bearer" else None
        if key is None:
            await unauthorized()(scope, receive, send)
            return
        if scope["method"] == "POST" and path in GENERATING:
            try:
                await self._limits.begin(key)
            except RateLimited as error:
                await problem_response(error)(scope, receive, send)
                return
        scope.setdefault("state", {})[ALLOWANCE] = Allowance(key=key, limits=self._limits)
        await self._app(scope, receive, send)

    @staticmethod
    def _is_guarded(path: str, method: str) -> bool:
        return method != "OPTIONS" and any(path == each or path.startswith(f"{each}/") for each in GUARDED)


def charged(scope: Mapping[str, Any], job: Job, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
    """The same deltas; their tokens, and the prompt's with the first, are taken from the key's allowance."""
    allowance: Allowance | None = scope.get("state", {}).get(ALLOWANCE)
    return deltas if allowance is None else _charged(allowance, job.num_prompt_tokens, deltas)


async def _charged(
    allowance: Allowance, prompt_tokens: int, deltas: AsyncGenerator[Delta, None]
) -> AsyncGenerator[Delta, None]:
    async with contextlib.aclosing(deltas):
        async for delta in deltas:
            allowance.used(len(delta.row.tokens) + prompt_tokens)
            prompt_tokens = 0
            yield delta


class BodyLimit:
    """Refuses a body that is too long, as declared or as received, nested too deep or too full, before it is parsed."""

    def __init__(self, app: ASGIApp, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        declared = Headers(scope=scope).get("content-length", "") if scope["type"] == "http" else ""
        too_long = f"The body is larger than {self._max_bytes} bytes."
        if declared.isdigit() and int(declared) > self._max_bytes:
            await problem_response(InvalidField(too_long))(scope, receive, send)
            return
        seen, parts = 0, list[bytes]()

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                parts.append(message.get("body", b""))
                seen += len(parts[-1])
                if seen > self._max_bytes:
                    raise HTTPException(400, too_long)
                if not message.get("more_body", False) and (problem := form_problem(parts)) is not None:
                    raise HTTPException(400, problem)
            return message

        await self._app(scope, counted, send)


def form_problem(parts: Sequence[bytes]) -> str | None:
    """What would make JSON text a burden to parse; None: nothing."""
    return nesting_problem(parts) or fullness_problem(parts)


def fullness_problem(parts: Sequence[bytes]) -> str | None:
    """Whether JSON text has too many values; None: it has not. Texts with few commas, nearly all, are not read."""
    if sum(part.count(b",") for part in parts) < MAX_VALUES:
        return None
    problem = f"The body has more than {MAX_VALUES} values."
    text = b"".join(parts).replace(rb"\\", b"").replace(rb"\"", b"")
    if text.count(b'"') > 2 * MAX_VALUES:  # each pair is a string
        return problem
    outside_strings = text.split(b'"')[::2]
    return problem if sum(part.count(b",") for part in outside_strings) >= MAX_VALUES else None


def nesting_problem(parts: Sequence[bytes]) -> str | None:
    """What is wrong with how JSON text is nested; None: nothing. Texts with few brackets, nearly all, are not read."""
    num_openers = sum(part.count(b"[") + part.count(b"{") for part in parts)
    if num_openers <= MAX_BODY_DEPTH:
        return None
    if num_openers > MAX_BRACKETS:
        return f"The body has more than {MAX_BRACKETS} brackets."
    depth, text = 0, b"".join(parts)
    for mark in _MARKS.finditer(text):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(mark[0], 0)
        if depth > MAX_BODY_DEPTH:
            return f"The body is nested more than {MAX_BODY_DEPTH} levels deep."
    return None
