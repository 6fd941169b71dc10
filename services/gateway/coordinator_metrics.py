"""The whole service as Prometheus metrics: own names, and vLLM's for what it has a name for.

Each coordinator counts since its own start under its own label (`engine`), and what one that has ended counted stays
(`services/accounts.py`): a sum over `engine` never goes back. Keys are words joined by dots or underscores
(`seqmtp_serve/frontier/ledger.py`); a trailing `posN` is the draft position, from 0, and `leB`, `sum`, `count` after
`…_seconds` are parts of a histogram.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from services.accounts import KEPT_S, Account
from services.gateway.board import StatusBoard
from services.gateway.coordinators import CoordinatorStatus
from services.gateway.metric_words import (
    COORDINATOR,
    COORDINATOR_GAUGES,
    PROPOSER,
    PROPOSER_GAUGES,
    TARGET,
    TARGET_GAUGES,
    help_of,
)

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
CACHE_USAGE = ("vllm:kv_cache_usage_perc", "Pages of the target group in use, 0 to 1.")
WORKERS = {"target": (TARGET, TARGET_GAUGES), "proposer": (PROPOSER, PROPOSER_GAUGES)}
_POSITION = re.compile(r"(?P<name>.+)\.pos(?P<position>\d+)")
_PART = re.compile(r"(?P<name>.+_seconds)\.(?:le(?P<bound>[0-9.e+-]+)|(?P<part>sum|count))")
_WORD = re.compile(r"[^a-zA-Z0-9_]")

Labelled = Sequence[tuple[list[str], Mapping[str, float]]]


class CoordinatorCollector(Collector):
    """Reads the board and the accounts when scraped; the /metrics route has refreshed both just before."""

    def __init__(self, board: StatusBoard) -> None:
        self._board = board
        self._shown: dict[str, Account] = {}  # what each coordinator that answered said last
        self.accounts: Sequence[Account] = ()

    def collect(self) -> Iterator[Metric]:
        """Every family, each name once."""
        statuses = self._board.known
        labelled = [([self._board.name_of(status), status.coordinator_id], status) for status in statuses]
        yield from _gauges(labelled)
        counted = [(labels, status.counters) for labels, status in labelled]
        counted += [
            ([each.model, each.id], each.counters) for each in self._ended({s.coordinator_id for s in statuses})
        ]
        for labels, status in labelled:
            model, engine = labels
            self._shown[engine] = Account(kind="coordinator", id=engine, model=model, counters=status.counters)
        yield from _levels("seqmtp_", LABELS, [(labels, one.gauges) for labels, one in labelled], COORDINATOR_GAUGES)
        yield from _counters("seqmtp_", LABELS, counted, COORDINATOR)
        yield from _aliases(counted)
        for kind, (counters, gauges) in WORKERS.items():
            own = [each for each in self.accounts if each.kind == kind]
            labels = ["model_name", kind]
            now = [([each.model, each.id], each.gauges) for each in own if each.is_live()]
            yield from _levels(f"seqmtp_{kind}_", labels, now, gauges)
            yield from _counters(
                f"seqmtp_{kind}_", labels, [([each.model, each.id], each.counters) for each in own], counters
            )

    def _ended(self, live: set[str]) -> list[Account]:
        """Those that do not answer: as they last said, here or in their account. The later of the two is the higher: a
        series that goes back is a restart to whoever takes its rate.
        """
        now = time.time()
        self._shown = {id: one for id, one in self._shown.items() if id in live or now - one.at < KEPT_S}
        found = {id: one for id, one in self._shown.items() if id not in live}
        for account in self.accounts:
            if account.kind == "coordinator" and account.id not in live:
                shown = found.get(account.id, account).counters
                counters = {
                    key: max(value, shown.get(key, 0.0)) for key, value in {**shown, **account.counters}.items()
                }
                found[account.id] = replace(account, counters=counters)
        return list(found.values())


def _gauges(labelled: Sequence[tuple[list[str], CoordinatorStatus]]) -> Iterator[Metric]:
    for name, text, attribute in GAUGES:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        for labels, status in labelled:
            family.add_metric(labels, float(getattr(status, attribute)))
        yield family
    usage = GaugeMetricFamily(*CACHE_USAGE, labels=LABELS)
    for labels, status in labelled:
        if pages := status.gauges.get("pages"):
            usage.add_metric(labels, 1 - status.gauges["pages_free"] / pages)
    yield usage


def _levels(prefix: str, names: list[str], labelled: Labelled, words: Mapping[str, str]) -> Iterator[Metric]:
    families: dict[str, GaugeMetricFamily] = {}
    for labels, gauges in labelled:
        for key, value in gauges.items():
            family = families.setdefault(key, GaugeMetricFamily(prefix + key, help_of(key, words), labels=names))
            family.add_metric(labels, value)
    yield from families.values()


def _counters(prefix: str, names: list[str], labelled: Labelled, words: Mapping[str, str]) -> Iterator[Metric]:
    families: dict[str, CounterMetricFamily] = {}
    spreads: dict[str, HistogramMetricFamily] = {}
    for labels, counters in labelled:
        for key, value in counters.items():
            if not _PART.fullmatch(key):
                name, position = name_of(key, prefix)
                more = [] if position is None else ["position"]
                text = help_of(key if position is None else key.rstrip("0123456789"), words)
                family = families.setdefault(name, CounterMetricFamily(name, text, labels=[*names, *more]))
                family.add_metric(labels if position is None else [*labels, position], value)
        for name in {part["name"] for key in counters if (part := _PART.fullmatch(key))}:
            spread = HistogramMetricFamily(prefix + _WORD.sub("_", name), help_of(name, words), labels=names)
            spreads.setdefault(name, spread).add_metric(labels, *_spread(name, counters))
    yield from families.values()
    yield from spreads.values()


def _spread(name: str, counters: Mapping[str, float]) -> tuple[list[tuple[str, float]], float]:
    """Buckets and sum of a histogram."""
    start = f"{name}.le"
    buckets = [(key.removeprefix(start), value) for key, value in counters.items() if key.startswith(start)]
    return [*sorted(buckets, key=lambda one: float(one[0])), ("+Inf", counters[f"{name}.count"])], counters[
        f"{name}.sum"
    ]


def _aliases(labelled: Labelled) -> Iterator[Metric]:
    for name, keys in ALIASES.items():
        family = CounterMetricFamily(name, f"Sum of {', '.join(keys)}.", labels=LABELS)
        for labels, counters in labelled:
            family.add_metric(labels, sum(counters.get(key, 0.0) for key in keys))
        yield family
    by_position = CounterMetricFamily(POSITION_ALIAS, "Accepted drafts by position.", labels=[*LABELS, "position"])
    for labels, counters in labelled:
        for key, value in counters.items():
            if key.startswith("accepted.") and (found := _POSITION.fullmatch(key)):
                by_position.add_metric([*labels, found["position"]], value)
    yield by_position


def name_of(key: str, prefix: str = "seqmtp_") -> tuple[str, str | None]:
    """Our Prometheus name of a counter key, and the draft position it is about. Pure."""
    if found := _POSITION.fullmatch(key):
        return f"{prefix}{_WORD.sub('_', found['name'])}_per_pos", found["position"]
    return prefix + _WORD.sub("_", key), None
