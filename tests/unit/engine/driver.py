"""A coordinator in thirty lines: plans steps for a target engine, commits everything it is told, keeps the rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from seqmtp_serve.engine.target import TargetEngine
from seqmtp_serve.frontier.ancestry import extend_digest, initial_digest
from seqmtp_serve.ports import Admit, Prefill, Publish, Release, RowResult, StepPlan, StepReport, Verify
from seqmtp_serve.request import Ref, Request, TokenLogprobs


@dataclass(slots=True)
class Stream:
    """One request as its coordinator sees it."""

    request: Request
    ref: Ref
    output: list[int] = field(default_factory=list)
    rows: list[RowResult] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    admitted: bool = False
    num_prefilled: int = 0
    num_prefix: int = 0
    publish: Publish | None = None

    @classmethod
    def open(cls, request: Request, epoch: int = 1) -> Stream:
        digest = initial_digest(request.prompt_ids)
        return cls(request, Ref(request_id=request.request_id, epoch=epoch, version=0, digest=digest))

    @property
    def stops(self) -> set[int]:
        params = self.request.params
        return set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.request.eos_token_ids))

    @property
    def done(self) -> bool:
        ended = bool(self.output) and self.output[-1] in self.stops
        return ended or len(self.output) >= self.request.params.max_tokens

    def commit(self, row: RowResult) -> None:
        """Take the row's tokens, cut after the first stop token or the budget."""
        tokens = list(row.tokens)
        for index, token in enumerate(tokens):
            if token in self.stops or len(self.output) + index + 1 >= self.request.params.max_tokens:
                tokens = tokens[: index + 1]
                break
        keep = row.accepted + 1 if self.output else 0
        self.output += tokens
        self.rows.append(row)
        digest = extend_digest(self.ref.digest, tokens)
        self.ref = Ref(
            request_id=self.ref.request_id, epoch=self.ref.epoch, version=self.ref.version + 1, digest=digest
        )
        self.publish = Publish(ref=self.ref, keep=keep)


@dataclass(slots=True)
class Driver:
    """Runs streams on one target, all that are given side by side."""

    target: TargetEngine
    depth: int = 3
    predicted: int = 0
    chunk: int = 1000
    num_steps: int = 0
    refused: list[RowResult] = field(default_factory=list)

    def step(self, streams: list[Stream], release: tuple[Release, ...] = ()) -> StepReport:
        """One step for every stream that is not done."""
        admit, publish, prefill, verify = [], [], [], []
        for stream in streams:
            if not stream.admitted:
                known = len(stream.request.prompt_ids) + len(stream.output)
                stream.num_prefix = known - 1 if stream.output else known
                stream.num_prefilled, stream.admitted, stream.publish = 0, True, None
                admit.append(Admit(ref=stream.ref, request=stream.request, output_ids=tuple(stream.output)))
            if stream.publish is not None:
                publish.append(stream.publish)
                stream.publish = None
            if stream.num_prefilled < stream.num_prefix:
                stop = min(stream.num_prefilled + self.chunk, stream.num_prefix)
                last = stop == stream.num_prefix
                prefill.append(Prefill(ref=stream.ref, start=stream.num_prefilled, stop=stop, last=last))
                stream.num_prefilled = stop
            else:
                verify.append(Verify(ref=stream.ref, depth=self.depth, predicted=self.predicted))
        self.num_steps += 1
        plan = StepPlan(
            step_id=self.num_steps,
            release=release,
            publish=tuple(publish),
            admit=tuple(admit),
            prefill=tuple(prefill),
            verify=tuple(verify),
        )
        report = self.target.step(plan)
        by_id = {stream.ref.request_id: stream for stream in streams}
        for row in report.rows:
            if row.error is not None:
                self.refused.append(row)
                continue
            by_id[row.ref.request_id].prompt_logprobs += row.prompt_logprobs
            if row.tokens:
                by_id[row.ref.request_id].commit(row)
        self.target.check()
        return report

    def run(self, *requests: Request) -> list[Stream]:
        """To the end of all requests; finished ones are released as they end."""
        streams = [Stream.open(request) for request in requests]
        self.resume(streams)
        return streams

    def resume(self, streams: list[Stream]) -> None:
        """Go on with streams until all are done, then release them."""
        running, release = list(streams), ()
        while running:
            self.step(running, release)
            assert self.refused == []
            ended = [stream for stream in running if stream.done]
            release = tuple(Release(request_id=stream.ref.request_id, epoch=stream.ref.epoch) for stream in ended)
            running = [stream for stream in running if not stream.done]
        self.target.step(StepPlan(step_id=0, release=release))
        self.target.check()

    def preempt(self, stream: Stream) -> None:
        """Take the stream's sequence away; its next step admits it again as a replay."""
        release = Release(request_id=stream.ref.request_id, epoch=stream.ref.epoch)
        self.target.step(StepPlan(step_id=0, release=(release,)))
        stream.admitted = False
