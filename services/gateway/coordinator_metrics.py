"""The coordinators' counters as Prometheus metrics: own names, and vLLM's for what it has a name for.

Each coordinator counts since its own start and keeps its own label (`engine`), so that a restart is a counter reset, as
Prometheus expects, and never a sum that goes back. Keys come from `Status.counters`: words joined by dots or
underscores (`seqmtp_serve/frontier/ledger.py`); a trailing `posN` is the draft position, from 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.board import StatusBoard
from services.gateway.coordinators import CoordinatorStatus

# vLLM's name (without _total) -> the counters it is the sum of. A draft, in its words, is a round that had drafts.
ALIASES = {
    "vllm:spec_decode_num_drafts": ("rounds.accepted", "rounds.rejected"),
    "vllm:spec_decode_num_draft_tokens": ("drafted",),
    "vllm:spec_decode_num_accepted_tokens": ("accepted",),
    "vllm:num_preemptions": ("preemptions",),
}
POSITION_ALIAS = "vllm:spec_decode_num_accepted_tokens_per_pos"
LABELS = ["model_name", "engine"]
GAUGES = (
    ("vllm:num_requests_running", "Requests being generated.", "running"),
    ("vllm:num_requests_waiting", "Requests waiting for a place in the batch.", "waiting"),
    ("seqmtp_target_ready", "1 if a target group is reachable.", "target_ready"),
    ("seqmtp_mtp_ready", "1 if drafts come; 0: generation goes on at depth 0.", "mtp_ready"),
    ("seqmtp_store_ready", "1 if the frontier store answers.", "store_ready"),
)
_POSITION = re.compile(r"(?P<name>.+)\.pos(?P<position>\d+)")
_WORD = re.compile(r"[^a-zA-Z0-9_]")


class CoordinatorCollector(Collector):
    """Reads the board when scraped; the /metrics route has refreshed it just before."""

    def __init__(self, board: StatusBoard) -> None:
        self._board = board

    def collect(self) -> Iterator[Metric]:
        """Every family, each name once."""
        labelled = [([self._board.name_of(status), status.coordinator_id], status) for status in self._board.known]
        yield from _gauges(labelled)
        yield from _counters(labelled)


Labelled = list[tuple[list[str], CoordinatorStatus]]


def _gauges(labelled: Labelled) -> Iterator[Metric]:
    for name, text, attribute in GAUGES:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        for labels, status in labelled:
            family.add_metric(labels, float(getattr(status, attribute)))
        yield family


def _counters(labelled: Labelled) -> Iterator[Metric]:
    families: dict[str, CounterMetricFamily] = {}

    def add(name: str, text: str, labels: list[str], position: str | None, value: float) -> None:
        more = [] if position is None else ["position"]
        family = families.setdefault(name, CounterMetricFamily(name, text, labels=[*LABELS, *more]))
        family.add_metric(labels if position is None else [*labels, position], value)

    for labels, status in labelled:
        for key, value in status.counters.items():
            name, position = name_of(key)
            add(name, f"Coordinator counter '{key.split('.pos')[0]}'.", labels, position, value)
            if position is not None and key.startswith("accepted."):
                add(POSITION_ALIAS, "Accepted drafts by position.", labels, position, value)
        for name, keys in ALIASES.items():
            total = sum(status.counters.get(key, 0.0) for key in keys)
            add(name, f"Sum of {', '.join(keys)}.", labels, None, total)
    yield from families.values()


def name_of(key: str) -> tuple[str, str | None]:
    """Our Prometheus name of a counter key, and the draft position it is about. Pure."""
    if found := _POSITION.fullmatch(key):
        return f"seqmtp_{_WORD.sub('_', found['name'])}_per_pos", found["position"]
    return f"seqmtp_{_WORD.sub('_', key)}", None
