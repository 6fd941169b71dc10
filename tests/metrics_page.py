"""docs/metrics.md, from the tables in the code: `python -m tests.metrics_page > docs/metrics.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry

from services.gateway.coordinator_metrics import ALIASES, CACHE_USAGE, GAUGES, POSITION_ALIAS, name_of
from services.gateway.measure import Measures
from services.gateway.metric_words import (
    COORDINATOR,
    COORDINATOR_GAUGES,
    PROPOSER,
    PROPOSER_GAUGES,
    TARGET,
    TARGET_GAUGES,
)

HEAD = """# Metrics

Made from the code by `python -m tests.metrics_page > docs/metrics.md`; a test says whether it is current. One scrape
of `/metrics` at any gateway shows the whole service; [observability](observability.md) says how. `*` stands for a
number or a word: a depth, a rank, a kind of pass, an error's code. Names that end in `_seconds` are histograms.
"""
Row = tuple[str, str, str]


def counters(prefix: str, table: Mapping[str, str]) -> Iterable[Row]:
    """Rows of one table of counters."""
    for key, text in table.items():
        name, position = (
            name_of(key + "0", prefix) if key.endswith(".pos") else name_of(key.replace("*", "STAR"), prefix)
        )
        shown = name.replace("STAR", "*") + ("" if key.endswith("_seconds") else "_total")
        kind = "histogram" if key.endswith("_seconds") else "counter"
        yield shown + ("" if position is None else "{position}"), kind, text


def gauges(prefix: str, table: Mapping[str, str]) -> Iterable[Row]:
    """Rows of one table of gauges."""
    return ((prefix + key, "gauge", text) for key, text in table.items())


def gateway() -> Iterable[Row]:
    """Rows of a gateway's own metrics."""
    registry = CollectorRegistry()
    Measures(registry)
    for family in registry.collect():
        suffix = "_total" if family.type == "counter" else ""
        yield family.name + suffix, family.type, family.documentation


def aliases() -> Iterable[Row]:
    """vLLM's names for what coordinators count."""
    for name, keys in ALIASES.items():
        yield name + "_total", "counter", f"{' + '.join(name_of(key)[0] + '_total' for key in keys)}."
    yield POSITION_ALIAS + "_total{position}", "counter", "seqmtp_accepted_per_pos_total."
    yield from ((name, "gauge", text) for name, text, _ in GAUGES)
    yield CACHE_USAGE[0], "gauge", CACHE_USAGE[1]


SECTIONS: Mapping[str, list[Row]] = {
    "Gateways (labels `gateway`, `model_name`)": list(gateway()),
    "vLLM's names, and readiness (labels `engine`: a coordinator, `model_name`)": list(aliases()),
    "Coordinators (labels `engine`, `model_name`)": [
        *counters("seqmtp_", COORDINATOR),
        *gauges("seqmtp_", COORDINATOR_GAUGES),
    ],
    "Targets (labels `target`, `model_name`; rank r of a group is `ID.r`)": [
        *counters("seqmtp_target_", TARGET),
        *gauges("seqmtp_target_", TARGET_GAUGES),
    ],
    "Proposers (labels `proposer`, `model_name`)": [
        *counters("seqmtp_proposer_", PROPOSER),
        *gauges("seqmtp_proposer_", PROPOSER_GAUGES),
    ],
}


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, rows in SECTIONS.items():
        lines = [f"| `{name}` | {kind} | {text} |" for name, kind, text in rows]
        parts.append("\n".join([f"## {title}\n", "| name | kind | what it is |", "|---|---|---|", *lines]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
