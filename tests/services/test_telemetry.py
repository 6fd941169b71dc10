"""Traces are off unless asked for, and a request's span continues its caller's trace."""

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from seqmtp_serve.errors import Fenced
from services import telemetry

PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "_tracer", provider.get_tracer("test"))
    return exporter


def test_nothing_is_exported_unless_an_endpoint_is_named(monkeypatch: pytest.MonkeyPatch):
    for name in telemetry.ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    before = trace.get_tracer_provider()
    with telemetry.exporting("coordinator", "c1"):
        assert trace.get_tracer_provider() is before
    monkeypatch.setenv(telemetry.ENDPOINTS[0], "http://127.0.0.1:4317")
    assert telemetry.is_configured()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not telemetry.is_configured()


def test_a_request_continues_its_callers_trace(spans: InMemorySpanExporter):
    with telemetry.request_span("generate", "chat-1", PARENT):
        pass
    (span,) = spans.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert span.attributes["seqmtp.request_id"] == "chat-1"


def test_an_error_marks_the_span(spans: InMemorySpanExporter):
    with pytest.raises(Fenced), telemetry.request_span("generate", "chat-1", {}):
        raise Fenced("another owner")
    (span,) = spans.get_finished_spans()
    assert not span.status.is_ok
