"""Traces, by OpenTelemetry's own rules: nothing is recorded unless an exporter is configured (`OTEL_*` variables).

One span a request in the coordinator, child of the gateway's by the W3C `traceparent` that travels with the request.
Numbers do not go through here: a coordinator's counters are in its Status, and the gateway's /metrics shows them.
The `OTEL_*` variables are OpenTelemetry's, read by its SDK and asked about here: they are no settings of ours.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.propagate import extract
from opentelemetry.trace import Span, SpanKind

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
EXPORT_TIMEOUT_S = 2  # a collector that is away must not hold a worker's end up
_tracer = trace.get_tracer("seqmtp")


def is_configured() -> bool:
    """Whether somebody wants traces."""
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    return not disabled and any(os.environ.get(name) for name in ENDPOINTS)


@contextmanager
def exporting(service: str, instance_id: str) -> Iterator[None]:
    """Export spans while the block runs, and flush at its end. Does nothing, and imports no SDK, unless configured."""
    if not is_configured():
        yield
        return
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    names = {"service.name": f"seqmtp-{service}", "service.instance.id": instance_id}
    provider = TracerProvider(resource=Resource.create(names))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=EXPORT_TIMEOUT_S)))
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
