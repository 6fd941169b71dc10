"""An OTLP collector in this process: it keeps what it is sent, over gRPC or over HTTP."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import TracebackType
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_rpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as traces
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as traces_rpc

Samples = dict[tuple[str, frozenset[tuple[str, str]]], Any]


def silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nobody had named a collector."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


class Collector:
    """Listens on loopback while its block runs. `spans` and `metric_sends` hold what came, in order."""

    def __init__(self, protocol: str = "grpc") -> None:
        self.spans: list[Any] = []
        self.metric_sends: list[Any] = []
        self._is_http = protocol == "http/protobuf"
        self.endpoint = ""

    def __enter__(self) -> Collector:
        if self._is_http:
            self._http = HTTPServer(("127.0.0.1", 0), _handler(self))
            self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
            self._thread.start()
            self.endpoint = f"http://127.0.0.1:{self._http.server_port}"
            return self
        self._grpc = grpc.server(ThreadPoolExecutor(1))
        traces_rpc.add_TraceServiceServicer_to_server(_Traces(self), self._grpc)
        metrics_rpc.add_MetricsServiceServicer_to_server(_Metrics(self), self._grpc)
        self.endpoint = f"http://127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self._grpc.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._is_http:
            self._http.shutdown()
            self._thread.join()
            self._http.server_close()
        else:
            self._grpc.stop(0).wait()

    @property
    def span_names(self) -> list[str]:
        return [
            span.name for sent in self.spans for one in sent.resource_spans for s in one.scope_spans for span in s.spans
        ]

    @property
    def resources(self) -> set[frozenset[tuple[str, str]]]:
        """Who has spoken."""
        sent = [one for each in self.spans for one in each.resource_spans]
        sent += [one for each in self.metric_sends for one in each.resource_metrics]
        return {_labels(one.resource.attributes) for one in sent}

    def samples(self) -> Samples:
        """The last export of metrics: values by name and labels; of a histogram (count, sum, bounds, counts)."""
        (resource,) = self.metric_sends[-1].resource_metrics
        found: Samples = {}
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for labels, value in _points(metric):
                    assert (metric.name, labels) not in found, "each series once"
                    found[metric.name, labels] = value
        return found


def _points(metric: Any) -> Iterator[tuple[frozenset[tuple[str, str]], Any]]:
    match metric.WhichOneof("data"):
        case "histogram":
            assert metric.histogram.aggregation_temporality == 2, "cumulative"
            for one in metric.histogram.data_points:
                value = (one.count, one.sum, tuple(one.explicit_bounds), tuple(one.bucket_counts))
                yield _labels(one.attributes), value
        case "sum":
            assert metric.sum.is_monotonic
            assert metric.sum.aggregation_temporality == 2
            yield from ((_labels(one.attributes), one.as_double) for one in metric.sum.data_points)
        case "gauge":
            yield from ((_labels(one.attributes), one.as_double) for one in metric.gauge.data_points)


def _labels(attributes: Any) -> frozenset[tuple[str, str]]:
    return frozenset((one.key, one.value.string_value) for one in attributes)


class _Traces(traces_rpc.TraceServiceServicer):
    def __init__(self, kept: Collector) -> None:
        self._kept = kept

    def Export(self, request: Any, context: Any) -> Any:
        self._kept.spans.append(request)
        return traces.ExportTraceServiceResponse()


class _Metrics(metrics_rpc.MetricsServiceServicer):
    def __init__(self, kept: Collector) -> None:
        self._kept = kept

    def Export(self, request: Any, context: Any) -> Any:
        self._kept.metric_sends.append(request)
        return metrics.ExportMetricsServiceResponse()


def _handler(kept: Collector) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/traces":
                kept.spans.append(traces.ExportTraceServiceRequest.FromString(body))
            else:
                kept.metric_sends.append(metrics.ExportMetricsServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
