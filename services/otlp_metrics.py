"""Prometheus families as OpenTelemetry metrics: the numbers of /metrics under the same names, with the same labels.

A counter's name has no `_total`: a Prometheus that takes OTLP adds it again. Values are cumulative; when they began is
not said: what ended processes counted is in them (`services/accounts.py`). GenAI's metrics get their own names back.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Metric as OtelMetric
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.core import Metric

from services.gateway.measure import GEN_AI_LABELS, GEN_AI_NAMES

UNKNOWN = 0  # a start time, in OTLP's words
CUMULATIVE = AggregationTemporality.CUMULATIVE


def metrics_data(families: Iterable[Metric], resource: Resource, now_ns: int | None = None) -> MetricsData:
    """Counters, gauges and histograms as one message."""
    at = time.time_ns() if now_ns is None else now_ns
    metrics = [metric for family in families if (metric := _metric(family, at)) is not None]
    scope = ScopeMetrics(InstrumentationScope("seqmtp"), metrics, "")
    return MetricsData([ResourceMetrics(resource, [scope], "")])


def _metric(family: Metric, at: int) -> OtelMetric | None:
    data: Sum | Gauge | Histogram
    match family.type:
        case "counter":
            data = Sum(list(_numbers(family, at)), CUMULATIVE, True)
        case "gauge":
            data = Gauge(list(_numbers(family, at)))
        case "histogram":
            data = Histogram(list(_spreads(family, at)), CUMULATIVE)
        case _:
            return None
    if not data.data_points:
        return None
    name = GEN_AI_NAMES.get(family.name, family.name)
    unit = "s" if family.name.endswith("_seconds") else ""
    return OtelMetric(name, family.documentation, unit, data)


def _numbers(family: Metric, at: int) -> Iterator[NumberDataPoint]:
    for sample in family.samples:
        if not sample.name.endswith("_created"):
            yield NumberDataPoint(_attributes(sample.labels), UNKNOWN, at, float(sample.value))


def _spreads(family: Metric, at: int) -> Iterator[HistogramDataPoint]:
    """One point for each set of labels. Prometheus' buckets are cumulative, OTLP's are not; extremes are unknown."""
    found: dict[frozenset[tuple[str, str]], tuple[dict[float, float], dict[str, float]]] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        buckets, others = found.setdefault(frozenset(labels.items()), ({}, {}))
        if "le" in sample.labels:
            buckets[float(sample.labels["le"])] = sample.value
        else:
            others[sample.name.removeprefix(family.name)] = sample.value
    for labelled, (buckets, others) in found.items():
        bounds = sorted(buckets)
        counts = [int(above - below) for below, above in pairwise([0.0, *(buckets[bound] for bound in bounds)])]
        yield HistogramDataPoint(
            attributes=_attributes(dict(labelled)),
            start_time_unix_nano=UNKNOWN,
            time_unix_nano=at,
            count=int(others["_count"]),
            sum=others["_sum"],
            bucket_counts=counts,
            explicit_bounds=bounds[:-1],
            min=None,  # type: ignore[arg-type]  # optional in OTLP
            max=None,  # type: ignore[arg-type]
        )


def _attributes(labels: Mapping[str, str]) -> dict[str, str]:
    return {GEN_AI_LABELS.get(name, name): value for name, value in labels.items()}
