"""What OpenTelemetry's own variables say: whether traces and metrics are exported, how, and as whom.

`OTEL_*` are no settings of ours: most are read by the SDK (endpoints, headers, certificates, timeouts, samplers,
resource attributes); here are those that an SDK leaves to whoever sets it up. Nothing of the SDK is imported until an
exporter is wanted.
"""

from __future__ import annotations

import logging
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

Signal = Literal["traces", "metrics"]

LOGGER = logging.getLogger("seqmtp.telemetry")
EXPORT_TIMEOUT_S = 2  # unless OTEL_EXPORTER_OTLP_TIMEOUT says otherwise: a collector that is away holds up no end
INTERVAL_MS = 60_000.0
_CLASS = {"traces": ("trace_exporter", "OTLPSpanExporter"), "metrics": ("metric_exporter", "OTLPMetricExporter")}
_PACKAGE = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http",
}


def is_wanted(signal: Signal) -> bool:
    """Whether somebody wants them: an endpoint is named, or the exporter is, and neither is switched off.

    Exporters other than `otlp` and `none` are passed over with a warning, as the specification asks.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    named = {one.strip().lower() for one in os.environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").split(",")} - {""}
    if unknown := named - {"otlp", "none"}:
        LOGGER.warning("OTEL_%s_EXPORTER: only otlp and none are known here, not %s", signal.upper(), sorted(unknown))
    if named - unknown:
        return "otlp" in named
    return _said(signal, "ENDPOINT") is not None


def exporter_of(signal: Signal) -> Any:
    """The SDK's exporter for it, gRPC or HTTP. A protocol that is not known is gRPC, with a warning."""
    protocol = _said(signal, "PROTOCOL") or "grpc"
    if protocol not in _PACKAGE:
        LOGGER.warning("OTEL_EXPORTER_OTLP_PROTOCOL: %s or %s, not %s", *_PACKAGE, protocol)
        protocol = "grpc"
    module, name = _CLASS[signal]
    exporter = getattr(import_module(f"{_PACKAGE[protocol]}.{module}"), name)
    return exporter(timeout=EXPORT_TIMEOUT_S if _said(signal, "TIMEOUT") is None else None)


def resource_of(service: str, instance_id: str | None) -> Resource:
    """Who speaks. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES have the last word."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    names = {"service.name": service, **({} if instance_id is None else {"service.instance.id": instance_id})}
    return Resource.create(names).merge(OTELResourceDetector().detect())


def interval_s() -> float:
    """Time between two exports of metrics: OTEL_METRIC_EXPORT_INTERVAL, milliseconds."""
    try:
        given = float(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "") or INTERVAL_MS)
    except ValueError:
        given = 0.0
    if not 0 < given < float("inf"):
        LOGGER.warning("OTEL_METRIC_EXPORT_INTERVAL is a number of milliseconds above 0: %g is used", INTERVAL_MS)
        given = INTERVAL_MS
    return given / 1000


def _said(signal: Signal, what: str) -> str | None:
    """A variable that can be for one signal or for all."""
    names = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_{what}", f"OTEL_EXPORTER_OTLP_{what}")
    return next((value for name in names if (value := os.environ.get(name, "").strip())), None)
