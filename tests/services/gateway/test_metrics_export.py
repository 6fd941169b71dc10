"""What a collector is sent over OTLP is what /metrics shows, whichever gateway sends it, and it never goes back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from services import otlp
from services.accounts import AccountBook
from services.gateway.measure import GEN_AI_LABELS, GEN_AI_NAMES
from services.otlp_metrics import metrics_data
from services.store.connection import connect
from services.store.embedded import EmbeddedValkey
from tests.patience import PATIENCE_S
from tests.services.coordinators import nodes
from tests.services.gateway.test_scrape import answers, gateway, totals_once, write_accounts
from tests.services.otlp_collector import Collector, Samples, silence


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(tmp_path_factory.mktemp("valkey")) as running:
        yield running


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    silence(monkeypatch)
    with Collector() as listening:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", listening.endpoint)
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
        yield listening


async def scraped(client: httpx.AsyncClient) -> Samples:
    """/metrics in a collector's words."""
    found: Samples = {}
    for family in text_string_to_metric_families((await client.get("/metrics")).text):
        name = GEN_AI_NAMES.get(family.name, family.name)
        for sample in family.samples:
            labels = frozenset((GEN_AI_LABELS.get(key, key), value) for key, value in sample.labels.items())
            if family.type != "histogram":
                found[name, labels] = sample.value
            elif sample.name.endswith("_sum"):
                found[name, labels] = _spread(family, sample)
    return found


def _spread(family, total):  # type: ignore[no-untyped-def]
    buckets = [
        (float(one.labels["le"]), one.value)
        for one in family.samples
        if one.name.endswith("_bucket") and total.labels.items() <= one.labels.items()
    ]
    counts = [int(above - below) for (_, below), (_, above) in zip([(0, 0), *buckets[:-1]], buckets, strict=True)]
    return int(buckets[-1][1]), total.value, tuple(bound for bound, _ in buckets[:-1]), tuple(counts)


def still(samples: Samples) -> Samples:
    """Without what moves though nobody asks for anything: memory of the store, commits of leases."""
    return {
        key: value for key, value in samples.items() if not key[0].startswith(("seqmtp_store_used", "seqmtp_steps"))
    }


def outputs(samples: Samples) -> float:
    return sum(value for (name, _), value in samples.items() if name == "seqmtp_outputs")


@pytest.mark.covers(109, 110)
async def test_a_collector_is_sent_what_metrics_shows(valkey: EmbeddedValkey, collector: Collector) -> None:
    async with nodes(valkey, "a", "b", delay_s=0.0) as (a, b), gateway(valkey) as client:
        told = await answers(client, 4)
        tokens = sum(one["usage"]["completion_tokens"] for one in told)
        await totals_once(client, "seqmtp_outputs_total", tokens)
        async with asyncio.timeout(60):
            while not collector.metric_sends or still(collector.samples()) != still(await scraped(client)):
                await asyncio.sleep(0.02)
        shown = collector.samples()
        assert outputs(shown) == tokens
        names = {name for name, _ in shown}
        assert {*GEN_AI_NAMES.values(), "seqmtp_commit_seconds", "vllm:spec_decode_num_accepted_tokens"} <= names
        assert not any(name.endswith("_total") for name in names)
        assert {dict(one)["service.name"] for one in collector.resources} == {"seqmtp"}

        await write_accounts(a, b)
        await a.kill()
        await a.forgotten()
        async with gateway(valkey) as other:
            await answers(other, 1)
            await totals_once(other, "seqmtp_outputs_total", tokens + 20)
            async with asyncio.timeout(60):
                while outputs(collector.samples()) != tokens + 20:
                    await asyncio.sleep(0.02)
    sent = [outputs(one) for one in _each_send(collector)]
    assert sent == sorted(sent), "a lost coordinator's counters stay, and no gateway sends an older sum"


def _each_send(collector: Collector) -> Iterator[Samples]:
    for send in list(collector.metric_sends):
        kept = Collector()
        kept.metric_sends = [send]
        yield kept.samples()


async def test_one_gateway_speaks_for_all_and_another_takes_over(valkey: EmbeddedValkey) -> None:
    async with connect(valkey.url, socket_timeout_s=PATIENCE_S) as redis:
        await redis.flushall()
        one, other = AccountBook(redis), AccountBook(redis)
        assert [await one.speaks("one", for_s=30), await other.speaks("other", for_s=30)] == [True, False]
        assert await one.speaks("one", for_s=30)
        await other.falls_silent("other")
        assert not await other.speaks("other", for_s=30), "only who speaks can fall silent"
        await one.falls_silent("one")
        assert await other.speaks("other", for_s=0.05)
        async with asyncio.timeout(60):
            while not await one.speaks("one", for_s=30):  # the lease lapses
                await asyncio.sleep(0.01)
        assert not await other.speaks("other", for_s=30)
        one._redis = connect("redis://127.0.0.1:1")
        assert await one.speaks("one", for_s=30), "without the store who spoke speaks on"


def test_buckets_and_numbers_are_those_of_prometheus() -> None:
    counter = CounterMetricFamily("seqmtp_rounds", "Rounds.", labels=["engine"])
    counter.add_metric(["a"], 3.0)
    spread = HistogramMetricFamily("seqmtp_commit_seconds", "Commits.", labels=["engine"])
    spread.add_metric(["a"], [("0.1", 2.0), ("1.0", 5.0), ("+Inf", 6.0)], 4.5)
    empty = CounterMetricFamily("seqmtp_nothing", "None.", labels=["engine"])
    (resource,) = metrics_data([counter, spread, empty], otlp.resource_of("seqmtp", None), 7).resource_metrics
    rounds, commits = resource.scope_metrics[0].metrics
    assert (rounds.name, rounds.data.data_points[0].value, rounds.unit) == ("seqmtp_rounds", 3.0, "")
    (point,) = commits.data.data_points
    assert (point.count, point.sum, point.explicit_bounds, point.bucket_counts) == (6, 4.5, [0.1, 1.0], [2, 3, 1])
    assert (commits.unit, dict(point.attributes or {})) == ("s", {"engine": "a"})
