"""Traces are off unless asked for, and a request's span continues its caller's trace."""

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from seqmtp_serve.errors import Fenced
from services import otlp, telemetry
from tests.services.otlp_collector import silence

PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "_tracer", provider.get_tracer("test"))
    return exporter


def test_nothing_is_exported_unless_an_endpoint_is_named(monkeypatch: pytest.MonkeyPatch):
    silence(monkeypatch)
    before = trace.get_tracer_provider()
    with telemetry.exporting("coordinator", "c1"):
        assert trace.get_tracer_provider() is before


@pytest.mark.parametrize(
    ("said", "traces", "metrics"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}, True, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4317"}, True, False),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:4317"}, False, True),
        ({"OTEL_METRICS_EXPORTER": "otlp"}, False, True),
        ({"OTEL_METRICS_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}, True, False),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}, False, True),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}, False, False),
    ],
)
def test_the_standard_variables_decide(monkeypatch: pytest.MonkeyPatch, said: dict[str, str], traces, metrics):
    silence(monkeypatch)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert (otlp.is_wanted("traces"), otlp.is_wanted("metrics")) == (traces, metrics)


def test_a_word_that_is_not_known_is_passed_over_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    silence(monkeypatch)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")
    assert not otlp.is_wanted("metrics")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "soon")
    assert otlp.interval_s() == 60
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "250")
    assert otlp.interval_s() == 0.25
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "pigeon")
    exporter = otlp.exporter_of("metrics")
    assert "grpc" in type(exporter).__module__
    exporter.shutdown()
    for word in ("console", "INTERVAL", "pigeon"):
        assert word in caplog.text


def test_the_operators_name_for_the_service_has_the_last_word(monkeypatch: pytest.MonkeyPatch):
    silence(monkeypatch)
    assert otlp.resource_of("seqmtp", None).attributes["service.name"] == "seqmtp"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    assert otlp.resource_of("seqmtp-target", "t1").attributes.items() >= {
        ("service.name", "chat"),
        ("service.instance.id", "t1"),
    }


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
