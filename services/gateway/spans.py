"""The gateway's span of a request, with OpenTelemetry's GenAI attributes. Texts are never put into a span.

There is no convention for speculation: those names are ours (`seqmtp.spec.*`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from opentelemetry.trace import INVALID_SPAN, Span, Status, StatusCode
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from seqmtp_serve.errors import SeqMTPError
from services.gateway.choice import Delta
from services.gateway.job import Job
from services.gateway.measure import PROVIDER, operation_of
from services.gateway.tally import Tally
from services.telemetry import request_span, traceparent_of

OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/v1/responses": "chat"}
STATE = "span"


class RequestSpans:
    """Plain ASGI: a span over the whole of each generating request, its stream included."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        operation = OPERATIONS.get(path) if scope["type"] == "http" and scope["method"] == "POST" else None
        if operation is None:
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        carrier = {name: value for name, value in Headers(scope=scope).items() if name in ("traceparent", "tracestate")}
        with request_span(operation, state.get("request_id", ""), carrier) as span:
            span.set_attributes({"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER})
            state[STATE] = span

            async def with_status(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(Status(StatusCode.ERROR))
                await send(message)

            await self._app(scope, receive, with_status)


def span_of(scope: Mapping[str, Any]) -> Span:
    """The request's span; one that records nothing, when nothing is traced."""
    span: Span = scope.get("state", {}).get(STATE, INVALID_SPAN)
    return span


def traceparent_for(scope: Mapping[str, Any], given: str | None) -> str | None:
    """What the request's record carries: our own span when there is one, else what the caller sent."""
    return traceparent_of(span_of(scope)) or given


def traced(span: Span, job: Job, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
    """The same deltas; what was asked and what came goes into the span."""
    return _watched(span, job, deltas) if span.is_recording() else deltas


async def _watched(span: Span, job: Job, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
    params, started, tally = job.choices[0].params, time.monotonic(), Tally(job)
    span.update_name(f"{operation_of(job)} {job.model}")
    asked: dict[str, AttributeValue | None] = {
        "gen_ai.request.model": job.model,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.seed": _signed(params.seed) if params.seeded else None,
        "gen_ai.request.stream": job.stream,
        "gen_ai.request.stop_sequences": list(params.stop) or None,
        "gen_ai.request.choice.count": len(job.choices),
        "gen_ai.response.id": job.id,
        "gen_ai.response.model": job.model,
        "gen_ai.usage.input_tokens": job.num_prompt_tokens,
        "seqmtp.spec.max_depth": params.max_depth,
    }
    span.set_attributes({name: value for name, value in asked.items() if value is not None})
    finished: list[str] = []
    try:
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                if not tally.num_output_tokens:
                    span.set_attribute("gen_ai.response.time_to_first_chunk", time.monotonic() - started)
                tally.add(delta.row)
                if delta.row.finish is not None:
                    finished.append(delta.row.finish.value)
                yield delta
    except SeqMTPError as error:
        span.set_attribute("error.type", error.code)
        span.set_status(Status(StatusCode.ERROR, error.code))
        raise
    finally:
        span.set_attribute("gen_ai.usage.output_tokens", tally.num_output_tokens)
        span.set_attribute("gen_ai.response.finish_reasons", finished)
        counts = {"rounds": len(tally.drafted), "drafted": sum(tally.drafted), "accepted": sum(tally.accepted)}
        span.set_attributes({f"seqmtp.spec.{name}": value for name, value in counts.items()})


def _signed(number: int) -> int:
    """OTLP's integers are signed."""
    return number if number < 2**63 else number - 2**64
