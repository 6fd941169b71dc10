"""Traces, by OpenTelemetry's own rules: nothing is recorded unless an exporter is configured (`OTEL_*` variables).

    gateway: chat MODEL ──▶ coordinator: generate ──▶ coordinator: round ──▶ target: verify ──▶ proposer: propose
                                                            commit (the store, as the coordinator waits for it)

One span a request in the gateway and in the coordinator, joined by the W3C `traceparent` that travels with the request.
Spans of rounds are made for a share of the traced requests (`telemetry.round_sample_ratio`, 0 by default), chosen by
trace id so that all processes agree; a step serves many requests, so its span in the target hangs below the first of
them. `traceparent` is a field of the frames: a stream of gRPC outlives any request.

Numbers do not go through here: what is counted is in accounts (`services/accounts.py`); /metrics shows it, and a
gateway exports it (`services/gateway/metrics_export.py`). What the `OTEL_*` variables ask for: `services/otlp.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.propagate import extract
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services import otlp

_tracer = trace.get_tracer("seqmtp")
_w3c = TraceContextTextMapPropagator()


def is_configured() -> bool:
    """Whether somebody wants traces."""
    return otlp.is_wanted("traces")


@contextmanager
def exporting(service: str, instance_id: str) -> Iterator[None]:
    """Export spans while the block runs, and flush at its end. Does nothing, and imports no SDK, unless configured."""
    if not is_configured():
        yield
        return
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=otlp.resource_of(f"seqmtp-{service}", instance_id))
    provider.add_span_processor(BatchSpanProcessor(otlp.exporter_of("traces")))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        provider.shutdown()


@contextmanager
def request_span(name: str, request_id: str, carrier: Mapping[str, str]) -> Iterator[Span]:
    """A server span for one request; `carrier` may hold the caller's `traceparent`. An exception marks it failed."""
    attributes = {"seqmtp.request_id": request_id}
    with _tracer.start_as_current_span(name, extract(carrier), SpanKind.SERVER, attributes=attributes) as span:
        yield span


@contextmanager
def step_span(name: str, traceparents: Sequence[str]) -> Iterator[None]:
    """A span below the first of `traceparents`, linked to the others; none when there are none. Current inside."""
    if not traceparents:
        yield
        return
    first, *others = [context_of(each) for each in dict.fromkeys(traceparents)]
    below = set_span_in_context(NonRecordingSpan(first))
    with _tracer.start_as_current_span(name, below, SpanKind.SERVER, links=[Link(each) for each in others]):
        yield


def start_span(
    name: str, parent: SpanContext, attributes: Mapping[str, int], kind: SpanKind = SpanKind.INTERNAL
) -> Span:
    """A span below `parent` that the caller ends."""
    return _tracer.start_span(name, set_span_in_context(NonRecordingSpan(parent)), kind, attributes)


def is_sampled(context: SpanContext, ratio: float) -> bool:
    """Whether rounds of this trace are to be shown: the same answer in every process. Pure."""
    bound = round(ratio * 2**64)
    return context.is_valid and context.trace_flags.sampled and (context.trace_id & (2**64 - 1)) < bound


def traceparent_of(span: Span) -> str:
    """The span as the `traceparent` of what comes below it; empty if it is not recorded."""
    carrier: dict[str, str] = {}
    if span.get_span_context().trace_flags.sampled:
        _w3c.inject(carrier, set_span_in_context(span))
    return carrier.get("traceparent", "")


def current_traceparent() -> str:
    """That of the span this thread or task is in."""
    return traceparent_of(trace.get_current_span())


def context_of(traceparent: str) -> SpanContext:
    """Inverse of `traceparent_of`; an invalid context for what is no traceparent."""
    return trace.get_current_span(_w3c.extract({"traceparent": traceparent})).get_span_context()
