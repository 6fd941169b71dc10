"""One request through gateway, coordinator, target and proposer as one trace; and nothing of it unless asked for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping

import httpx
import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from seqmtp_serve.fake import FakeTargetGroup
from seqmtp_serve.ports import FeedRows, StepPlan, StepReport, TargetInfo
from services import telemetry
from services.coordinator.round_spans import RoundSpans
from services.coordinator.target_link import GrpcTargetGroup
from services.gateway.app import create_app
from services.gateway.directory import FixedDirectory
from services.gateway.grpc_coordinators import GrpcCoordinators
from services.rpc import channel
from services.rpc.wire import target_rpc
from services.settings import Settings
from services.store.embedded import EmbeddedValkey
from services.target.proposer_link import GrpcProposer
from services.target.servicer import TargetServicer
from services.target.step_thread import StepThread
from tests.services.coordinators import INFO, nodes
from tests.services.gateway.world import TEXT, streamed
from tests.services.otlp_collector import Collector, silence
from tests.services.test_proposer_link import Service

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
SAMPLED = {"seed": 5, "temperature": 0.5, "stop": ["never"], "max_tokens": 9, "ignore_eos": True}


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(tmp_path_factory.mktemp("valkey")) as running:
        yield running


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "_tracer", provider.get_tracer("test"))
    monkeypatch.setattr(telemetry, "is_configured", lambda: True)
    monkeypatch.setattr(telemetry, "exporting", lambda *names: contextlib.nullcontext())
    return exporter


class FeedingEngine:
    """The toy target, which sends a row to the proposer for each round."""

    def __init__(self, link: GrpcProposer) -> None:
        self._link, self._fake = link, FakeTargetGroup(INFO)

    def info(self) -> TargetInfo:
        return INFO

    def levels(self) -> Mapping[str, float]:
        return {}

    @property
    def is_idle(self) -> bool:
        return not self._fake.held

    def check(self) -> None:
        pass

    def step(self, plan: StepPlan) -> StepReport:
        report = self._fake.run(plan)
        feeds = [
            FeedRows(ref=one.ref, first_base=0, hidden=torch.zeros(1, 4), next_ids=(1,), depth=1, reset=True)
            for one in plan.verify
        ]
        self._link.feed(feeds)
        return report


@contextlib.asynccontextmanager
async def target_group() -> AsyncIterator[str]:
    """A target and its proposer behind real gRPC."""
    proposer = Service()
    await proposer.start()

    async def discover() -> list[str]:
        return [proposer.address]

    link = GrpcProposer(discover, lambda info: None)
    linking = asyncio.create_task(link.run())
    async with asyncio.timeout(20):
        while not link.ready:
            await asyncio.sleep(0.001)
    steps, server = StepThread(FeedingEngine(link)), channel.new_server()
    target_rpc.add_TargetServicer_to_server(TargetServicer(steps, INFO, link), server)
    address = channel.bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)
        linking.cancel()
        await proposer.stop()
        steps.close()


async def one_answer(valkey: EmbeddedValkey, *, ratio: float, headers: Mapping[str, str] = PARENT) -> list[object]:
    """Ask once, through everything; the events."""
    async with target_group() as address, contextlib.AsyncExitStack() as at_the_end:

        async def discover() -> list[str]:
            return [address]

        link = GrpcTargetGroup(discover, RoundSpans(ratio))
        at_the_end.push_async_callback(link.close)
        async with nodes(valkey, "a", target=link) as (a,):
            app = create_app(Settings(), GrpcCoordinators(FixedDirectory([a.address])), TEXT)
            transport = httpx.ASGITransport(app)
            async with (
                app.router.lifespan_context(app),
                httpx.AsyncClient(transport=transport, base_url="http://g", headers=headers) as client,
            ):
                return await streamed(client, messages=[{"role": "user", "content": "a secret"}], **SAMPLED)


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name == name]


async def until_proposed(spans: InMemorySpanExporter) -> None:
    async with asyncio.timeout(30):
        while not named(spans, "propose"):
            await asyncio.sleep(0.005)


@pytest.mark.covers(109)
async def test_one_trace_from_the_caller_to_the_proposer(valkey: EmbeddedValkey, spans: InMemorySpanExporter) -> None:
    await one_answer(valkey, ratio=1.0)
    await until_proposed(spans)
    (root,), (owner,) = named(spans, "chat fake"), named(spans, "generate")
    rounds, verifies, proposes = named(spans, "round"), named(spans, "verify"), named(spans, "propose")
    assert {f"{span.context.trace_id:032x}" for span in spans.get_finished_spans()} == {TRACE}
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == "b7ad6b7169203331"
    assert owner.parent is not None
    assert owner.parent.span_id == root.context.span_id
    assert {span.parent.span_id for span in rounds if span.parent} == {owner.context.span_id}
    commits = named(spans, "commit")
    assert {span.parent.span_id for span in commits if span.parent} == {owner.context.span_id}
    versions = [dict(span.attributes or {})["seqmtp.version"] for span in commits]
    assert versions == list(range(1, len(rounds) + 2)), "each row, in order, the bootstrap's first"
    below_coordinator = {span.context.span_id for span in (*rounds, *named(spans, "prefill"))}
    assert {span.parent.span_id for span in verifies if span.parent} <= below_coordinator
    assert {span.parent.span_id for span in proposes if span.parent} <= {span.context.span_id for span in verifies}
    given = dict(root.attributes or {})
    assert given["gen_ai.operation.name"] == "chat"
    assert (given["gen_ai.request.model"], given["gen_ai.request.max_tokens"]) == ("fake", 9)
    assert (given["gen_ai.request.seed"], given["gen_ai.request.temperature"]) == (5, 0.5)
    assert (given["gen_ai.usage.output_tokens"], given["gen_ai.response.finish_reasons"]) == (9, ("length",))
    assert given["http.response.status_code"] == 200
    told = [dict(span.attributes or {}) for span in rounds]
    assert given["seqmtp.spec.rounds"] == sum(one["seqmtp.drafted"] > 0 for one in told)
    assert given["seqmtp.spec.accepted"] == sum(one["seqmtp.accepted"] for one in told)
    assert 9 <= 1 + sum(one["seqmtp.tokens"] for one in told) <= 9 + 3, "the last round may be cut"
    assert "a secret" not in "".join(span.to_json() for span in spans.get_finished_spans())


async def test_rounds_have_no_spans_by_default(valkey: EmbeddedValkey, spans: InMemorySpanExporter) -> None:
    await one_answer(valkey, ratio=0.0)
    assert sorted(span.name for span in spans.get_finished_spans()) == ["chat fake", "generate"]


async def test_a_trace_that_the_caller_does_not_sample_is_not_recorded(
    valkey: EmbeddedValkey, spans: InMemorySpanExporter
) -> None:
    unsampled = {"traceparent": PARENT["traceparent"][:-2] + "00"}
    await one_answer(valkey, ratio=1.0, headers=unsampled)
    assert spans.get_finished_spans() == ()


async def test_off_means_off(valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch) -> None:
    silence(monkeypatch)
    app = create_app(Settings(), GrpcCoordinators(FixedDirectory([])), TEXT)
    assert "RequestSpans" not in [getattr(one.cls, "__name__", "") for one in app.user_middleware]
    with telemetry.step_span("verify", []):
        assert telemetry.current_traceparent() == ""


def test_every_process_samples_the_same_traces() -> None:
    contexts = [telemetry.context_of(f"00-{number:032x}-{1:016x}-01") for number in (1, 2**62, 2**63, 2**64 - 1)]
    assert [telemetry.is_sampled(one, 0.5) for one in contexts] == [True, True, False, False]
    assert not telemetry.is_sampled(telemetry.context_of("nonsense"), 1.0)
    assert telemetry.is_sampled(contexts[3], 1.0)
    assert not telemetry.is_sampled(telemetry.context_of(f"00-{1:032x}-{1:016x}-00"), 1.0)


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_spans_reach_an_otlp_collector(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    providers: list[TracerProvider] = []
    monkeypatch.setattr(trace, "set_tracer_provider", providers.append)  # the real one can be set but once
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=rig")
    with Collector(protocol) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        with telemetry.exporting("coordinator", "c1"):
            monkeypatch.setattr(telemetry, "_tracer", providers[0].get_tracer("test"))
            with telemetry.request_span("generate", "chat-1", {}):
                pass
    assert collector.span_names == ["generate"]
    (resource,) = collector.resources
    assert dict(resource).items() >= {
        ("service.name", "seqmtp-coordinator"),
        ("service.instance.id", "c1"),
        ("deployment.environment.name", "rig"),
    }
