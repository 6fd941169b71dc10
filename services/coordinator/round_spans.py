"""Spans of rounds, for the requests whose trace is sampled for them. With a ratio of 0 nothing is kept or looked up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode

from seqmtp_serve.ports import Commit, Prefill, StepPlan, StepReport, Verify
from services.telemetry import is_sampled, start_span, traceparent_of

BATCH = "db.operation.batch.size"  # OpenTelemetry's word
MAX_REQUESTS = 4096  # whose end was never seen here; then the oldest are forgotten


class StepTrace:
    """The spans of one step. `traceparent` goes out with the plan; `report` is to be set when it is answered."""

    __slots__ = ("report", "traceparent")

    def __init__(self, traceparent: str = "") -> None:
        self.traceparent = traceparent
        self.report: StepReport | None = None


class RoundSpans:
    """Remembers the span of each sampled request, and puts its rounds below it."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._contexts: dict[str, SpanContext] = {}

    def begin(self, request_id: str, span: Span) -> None:
        """The request is under way; its rounds belong below `span`."""
        if self._ratio and is_sampled(span.get_span_context(), self._ratio):
            self._contexts[request_id] = span.get_span_context()
            if len(self._contexts) > MAX_REQUESTS:
                del self._contexts[next(iter(self._contexts))]

    @contextmanager
    def commit(self, commits: Sequence[Commit]) -> Iterator[None]:
        """A span for each sampled request whose row is in the pipeline, until the store has answered for all."""
        traced = [(one, context) for one in commits if (context := self._contexts.get(one.row.request_id)) is not None]
        spans = [
            start_span("commit", context, {"seqmtp.version": one.row.version, BATCH: len(commits)}, SpanKind.CLIENT)
            for one, context in traced
        ]
        try:
            yield
        except Exception as error:
            for span in spans:
                span.set_status(Status(StatusCode.ERROR, str(error)))
            raise
        finally:
            for span in spans:
                span.end()

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[StepTrace]:
        """A span for each sampled request in the plan, from sending it to its report."""
        if not self._contexts:
            yield StepTrace()
            return
        items: list[Prefill | Verify] = [*plan.prefill, *plan.verify]
        spans = {
            item.ref.request_id: _start(item, context, plan)
            for item in items
            if (context := self._contexts.get(item.ref.request_id)) is not None
        }
        traced = StepTrace(next(map(traceparent_of, spans.values()), ""))
        try:
            yield traced
        except BaseException as error:
            for span in spans.values():
                span.set_status(Status(StatusCode.ERROR, str(error)))
            raise
        finally:
            for row in traced.report.rows if traced.report is not None else ():
                if (own := spans.get(row.ref.request_id)) is not None:
                    counts = {"drafted": row.drafted, "accepted": row.accepted, "tokens": len(row.tokens)}
                    own.set_attributes({f"seqmtp.{name}": number for name, number in counts.items()})
                    if row.error is not None:
                        own.set_status(Status(StatusCode.ERROR, row.error))
            for span in spans.values():
                span.end()
            for release in plan.release:
                self._contexts.pop(release.request_id, None)


def _start(item: Prefill | Verify, context: SpanContext, plan: StepPlan) -> Span:
    if isinstance(item, Verify):
        numbers = {"version": item.ref.version, "depth": item.depth, "batch": len(plan.verify)}
        return start_span("round", context, {f"seqmtp.{name}": number for name, number in numbers.items()})
    return start_span("prefill", context, {"seqmtp.step_id": plan.step_id})
