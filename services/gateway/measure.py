"""What the gateway sees of its requests, as Prometheus metrics under vLLM's names (`vllm:…`) and our own (`seqmtp_…`).

Times run from the moment a request was accepted to the moment a committed row arrived. TPOT excludes the first row, as
`vllm bench serve` defines it; the time between rows (`inter_token_latency`) is that of chunks, not tokens: under
speculation a chunk holds several.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from seqmtp_serve.errors import AncestryMismatch, Fenced, ProtocolError, SeqMTPError, StaleVersion
from services.gateway.choice import Delta
from services.gateway.job import Job
from services.gateway.metric_words import OPEN_FILES, TASKS
from services.process_levels import num_open_files, num_tasks

TTFT_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
# Below vLLM's first bound of 10 ms too: a speculator's time per token may be less.
TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20)
E2E_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000)
# OpenTelemetry's GenAI conventions for servers, as Prometheus spells them, and their own names for OTLP.
GEN_AI_NAMES = {
    "gen_ai_server_time_to_first_token_seconds": "gen_ai.server.time_to_first_token",
    "gen_ai_server_time_per_output_token_seconds": "gen_ai.server.time_per_output_token",
    "gen_ai_server_request_duration_seconds": "gen_ai.server.request.duration",
}
GEN_AI_LABELS = {
    "gen_ai_operation_name": "gen_ai.operation.name",
    "gen_ai_provider_name": "gen_ai.provider.name",
    "gen_ai_request_model": "gen_ai.request.model",
}
PROVIDER = "seqmtp"


class Measures:
    """One gateway's own counters; a second gateway in one process has its own registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ["model_name"], buckets=buckets, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ["model_name", *labels], registry=registry)

        def twice(name: str, text: str, gen_ai: str, buckets: tuple[float, ...]) -> tuple[Histogram, Histogram]:
            convention = f"{GEN_AI_NAMES[gen_ai]}: {name} under OpenTelemetry's name."
            return histogram(name, text, buckets), Histogram(
                gen_ai, convention, [*GEN_AI_LABELS], buckets=buckets, registry=registry
            )

        self.ttft = twice(
            "vllm:time_to_first_token_seconds",
            "Request to first committed row.",
            "gen_ai_server_time_to_first_token_seconds",
            TTFT_S,
        )
        self.icl = histogram("vllm:inter_token_latency_seconds", "Between committed rows of one choice.", TPOT_S)
        self.tpot = twice(
            "vllm:request_time_per_output_token_seconds",
            "A choice's mean after its first row.",
            "gen_ai_server_time_per_output_token_seconds",
            TPOT_S,
        )
        self.e2e = twice(
            "vllm:e2e_request_latency_seconds",
            "Request to last committed row.",
            "gen_ai_server_request_duration_seconds",
            E2E_S,
        )
        self.prompt_sizes = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.output_sizes = histogram("vllm:request_generation_tokens", "Output tokens of a choice.", TOKENS)
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of accepted requests.")
        self.output_tokens = counter("vllm:generation_tokens", "Committed tokens.")
        self.success = counter("vllm:request_success", "Finished choices.", "finished_reason")
        self.failures = counter("seqmtp_request_failures", "Requests that ended in an error, by its code.", "code")
        self.abandoned = counter("seqmtp_requests_abandoned", "Requests whose reader left before the end.")
        self.resumed = counter("seqmtp_streams_resumed", "Streams of answers that existed already.")
        self.open = Gauge("seqmtp_open_requests", "Requests being answered.", registry=registry)
        Gauge("seqmtp_gateway_tasks", TASKS, registry=registry).set_function(num_tasks)
        Gauge("seqmtp_gateway_open_files", OPEN_FILES, registry=registry).set_function(num_open_files)
        self._wrong_rows = Counter(
            "seqmtp_rows_refused",
            "Rows from a coordinator that did not follow from those before, by error code. None was shown.",
            ["code"],
            registry=registry,
        )
        for error in (ProtocolError, StaleVersion, Fenced, AncestryMismatch):
            self._wrong_rows.labels(error.code)  # counted from 0
        self.registry = registry

    def wrong_row(self, code: str) -> None:
        """A row that a coordinator sent was refused."""
        self._wrong_rows.labels(code).inc()

    async def watch(self, job: Job, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        """Pass deltas through, measuring. The clock starts when the first delta is asked for."""
        start = time.perf_counter()
        clocks: dict[int, _Clock] = {}
        ended = False
        self.open.inc()
        try:
            async with contextlib.aclosing(deltas):
                async for delta in deltas:
                    self._row(job, delta, start, clocks)
                    yield delta
            ended = True
        except SeqMTPError as error:
            ended = True
            self.failures.labels(job.model, error.code).inc()
            raise
        finally:
            self.open.dec()
            if not ended:
                self.abandoned.labels(job.model).inc()

    def _row(self, job: Job, delta: Delta, start: float, clocks: dict[int, _Clock]) -> None:
        now, row = time.perf_counter(), delta.row
        if not clocks:
            self.prompt_tokens.labels(job.model).inc(job.num_prompt_tokens)
            self.prompt_sizes.labels(job.model).observe(job.num_prompt_tokens)
        self.output_tokens.labels(job.model).inc(len(row.tokens))
        clock = clocks.get(delta.index)
        if clock is None:
            clock = clocks[delta.index] = _Clock(now, len(row.tokens))
            _observe(job, self.ttft, now - start)
        else:
            self.icl.labels(job.model).observe(now - clock.last)
            clock.last = now
            clock.later_tokens += len(row.tokens)
        if row.finish is not None:
            _observe(job, self.e2e, now - start)
            self.success.labels(job.model, row.finish.value).inc()
            self.output_sizes.labels(job.model).observe(clock.first_tokens + clock.later_tokens)
            if clock.later_tokens:
                _observe(job, self.tpot, (now - clock.first) / clock.later_tokens)


def _observe(job: Job, twice: tuple[Histogram, Histogram], seconds: float) -> None:
    vllm, gen_ai = twice
    vllm.labels(job.model).observe(seconds)
    gen_ai.labels(operation_of(job), PROVIDER, job.model).observe(seconds)


def operation_of(job: Job) -> str:
    """In the words of the GenAI conventions."""
    return "text_completion" if job.id.startswith("cmpl") else "chat"


class _Clock:
    """When a choice's rows came, seconds, and how many tokens."""

    __slots__ = ("first", "first_tokens", "last", "later_tokens")

    def __init__(self, now: float, first_tokens: int) -> None:
        self.first = self.last = now
        self.first_tokens = first_tokens
        self.later_tokens = 0
