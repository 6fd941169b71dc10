"""A target group without a model: the whole protocol, a toy language, scripted acceptance. For tests and demos.

The next token is a hash of everything before it, so the right text of any request is known (`fake_text`), and any
token lost, repeated or altered changes all that follow. It is strict: what a real group refuses, it refuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from struct import pack

from seqmtp_serve.errors import (
    AncestryMismatch,
    Fenced,
    IllegalTransition,
    NotReady,
    Overloaded,
    ProtocolError,
    RequestNotFound,
    SeqMTPError,
    StaleVersion,
)
from seqmtp_serve.frontier.ancestry import extend_digest
from seqmtp_serve.frontier.finish import FinishChecker
from seqmtp_serve.ports import Admit, Prefill, Publish, RowResult, StepCosts, StepPlan, StepReport, TargetInfo, Verify
from seqmtp_serve.request import Ref, Request, TokenLogprobs

FAKE_INFO = TargetInfo(
    group_id="fake-1",
    model="fake",
    max_model_len=128,
    vocab_size=26,
    page_size=4,
    num_pages=64,
    max_batch=8,
    max_depth=3,
    numerics="invariant",
    manifest_fingerprint="",
)

_Item = Publish | Admit | Prefill | Verify


def fake_piece(token: int) -> str:
    """The text of a token: a letter."""
    return chr(ord("a") + token % 26)


def fake_next(request: Request, output_ids: Sequence[int], vocab_size: int = FAKE_INFO.vocab_size) -> int:
    """The token that follows, never one that would stop the text before `min_tokens`."""
    masked: set[int] = set()
    if len(output_ids) < request.params.min_tokens:
        masked = {*request.eos_token_ids, *request.params.stop_token_ids}
    token = _hash(*request.prompt_ids, *output_ids) % vocab_size
    while token in masked:
        token = (token + 1) % vocab_size
    return token


def fake_logprobs(tokens: Sequence[int], num_top: int | None) -> tuple[TokenLogprobs, ...]:
    """Made up from the tokens alone; none when they are not asked for."""
    if num_top is None:
        return ()
    return tuple(
        TokenLogprobs(
            logprob=-(token % 8) / 4,
            rank=1 + token % 8,
            top_ids=tuple((token + more) % FAKE_INFO.vocab_size for more in range(num_top)),
            top_logprobs=tuple(-more / 4 for more in range(num_top)),
        )
        for token in tokens
    )


def fake_text(request: Request) -> tuple[int, ...]:
    """All tokens of the request, decoded plainly, one at a time."""
    checker, output_ids = FinishChecker(request), list[int]()
    while checker.finish is None:
        output_ids.append(fake_next(request, output_ids))
        checker.push(output_ids[-1], fake_piece(output_ids[-1]))
    return tuple(output_ids)


@dataclass(slots=True)
class _Held:
    request: Request
    ref: Ref
    output_ids: list[int]
    kv_len: int = 0  # canonical rows
    num_rows: int = 0  # with provisional ones
    selected: list[int] = field(default_factory=list)
    selected_keep: int = 0

    @property
    def prefill_len(self) -> int:
        return len(self.request.prompt_ids) + max(0, len(self.output_ids) - 1)


class FakeTargetGroup:
    """Implements ports.TargetGroup. `lose()` takes everything away until `restore()`; `delay_s` slows each step."""

    def __init__(self, info: TargetInfo = FAKE_INFO, *, delay_s: float = 0.0) -> None:
        self._info = info
        self.delay_s = delay_s
        self.held: dict[str, _Held] = {}
        self.plans: list[StepPlan] = []
        self._gone = False

    def lose(self) -> None:
        """The process dies: state gone, calls fail."""
        self._gone = True
        self.held.clear()

    def restore(self) -> None:
        """A new process takes its place, empty."""
        self._gone = False

    async def info(self) -> TargetInfo:
        """What the group can do; NotReady while it is gone."""
        await asyncio.sleep(0)
        self._require()
        return self._info

    async def step(self, plan: StepPlan) -> StepReport:
        """Run a plan; NotReady when the group goes before it has answered."""
        self._require()
        report = self.run(plan)
        await asyncio.sleep(self.delay_s)
        self._require()
        return report

    def run(self, plan: StepPlan) -> StepReport:
        """Run a plan now, in the order StepPlan declares; each refused item leaves the others alone."""
        self._note(plan)
        rows = [row for row in self._run(plan) if row is not None]
        free = self._info.num_pages - self._used_pages()
        costs = StepCosts(forward=1.0, select=0.1, pack=0.1, num_rows=sum(item.depth + 1 for item in plan.verify))
        return StepReport(step_id=plan.step_id, rows=tuple(rows), costs=costs, free_pages=free, proposer_ready=True)

    def _note(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def levels(self) -> dict[str, float]:
        """What is held now, for telemetry."""
        pages, free = self._info.num_pages, self._info.num_pages - self._used_pages()
        return {"sequences": float(len(self.held)), "pages": float(pages), "pages_free": float(free)}

    def _run(self, plan: StepPlan) -> Iterator[RowResult | None]:
        for release in plan.release:
            held = self.held.get(release.request_id)
            if held is not None and held.ref.epoch <= release.epoch:
                del self.held[release.request_id]
        items: tuple[_Item, ...] = (*plan.publish, *plan.admit, *plan.prefill, *plan.verify)
        for item in items:
            try:
                yield self._do(item)
            except SeqMTPError as error:
                yield RowResult(ref=item.ref, error=error.code, message=str(error))

    def _do(self, item: _Item) -> RowResult | None:
        match item:
            case Admit():
                self._admit(item)
                return None
            case Publish():
                self._publish(item)
                return None
            case Prefill():
                return self._prefill(self._find(item.ref), item)
            case Verify():
                return self._verify(self._find(item.ref), item)

    def _admit(self, item: Admit) -> None:
        known = self.held.get(item.ref.request_id)
        if known is not None and known.ref.epoch >= item.ref.epoch:
            self._find(item.ref)
            raise IllegalTransition(f"{item.ref.request_id} is admitted already")
        output_ids = list(item.output_ids)
        self.held[item.ref.request_id] = _Held(request=item.request, ref=item.ref, output_ids=output_ids)

    def _publish(self, item: Publish) -> None:
        held = self.held.get(item.ref.request_id)
        if held is None:
            raise RequestNotFound(item.ref.request_id)
        after = extend_digest(held.ref.digest, held.selected)
        if (item.ref.version, item.ref.digest, item.keep) != (held.ref.version + 1, after, held.selected_keep):
            raise AncestryMismatch(f"{item} does not publish {held}")
        held.ref = item.ref
        held.output_ids += held.selected
        held.kv_len += item.keep
        held.num_rows = held.kv_len
        held.selected = []

    def _prefill(self, held: _Held, item: Prefill) -> RowResult:
        if item.start != held.kv_len or item.last != (item.stop == held.prefill_len) or item.stop > held.prefill_len:
            raise IllegalTransition(f"{item} after {held.kv_len} of {held.prefill_len} rows")
        self._grow(held, item.stop)
        held.kv_len = item.stop
        params = held.request.params
        following = () if held.output_ids else held.request.prompt_ids[item.start + 1 : item.stop + 1]
        scored = RowResult(ref=item.ref, prompt_logprobs=fake_logprobs(following, params.prompt_logprobs))
        if not item.last or held.output_ids:
            return scored
        held.selected, held.selected_keep = self._next_tokens(held.request, held.output_ids, 1), 0
        return replace(scored, tokens=tuple(held.selected), logprobs=fake_logprobs(held.selected, params.logprobs))

    def _verify(self, held: _Held, item: Verify) -> RowResult:
        if held.selected or not held.output_ids or held.kv_len != held.prefill_len:
            raise IllegalTransition(f"{item} meets {held}")
        self._grow(held, held.kv_len + item.depth + 1)
        accepted = self._num_accepted(held.request, held.output_ids, item.depth)
        held.selected += self._next_tokens(held.request, held.output_ids, accepted + 1)
        held.selected_keep = accepted + 1
        scores = fake_logprobs(held.selected, held.request.params.logprobs)
        return RowResult(
            ref=item.ref, tokens=tuple(held.selected), drafted=item.depth, accepted=accepted, logprobs=scores
        )

    def _num_accepted(self, request: Request, output_ids: Sequence[int], depth: int) -> int:
        return _hash(depth, *output_ids) % (depth + 1)

    def _next_tokens(self, request: Request, output_ids: Sequence[int], count: int) -> list[int]:
        text = list(output_ids)
        for _ in range(count):
            text.append(fake_next(request, text))
        return text[len(output_ids) :]

    def _find(self, ref: Ref) -> _Held:
        held = self.held.get(ref.request_id)
        if held is None:
            raise RequestNotFound(ref.request_id)
        if ref.epoch != held.ref.epoch:
            raise Fenced(f"{ref}, here {held.ref}") if ref.epoch < held.ref.epoch else ProtocolError(f"{ref} is new")
        if ref.version != held.ref.version:
            raise StaleVersion(f"{ref}, here {held.ref}")
        if ref.digest != held.ref.digest:
            raise AncestryMismatch(f"{ref}, here {held.ref}")
        return held

    def _grow(self, held: _Held, num_rows: int) -> None:
        used = self._used_pages() - self._pages(held.num_rows) + self._pages(num_rows)
        if used > self._info.num_pages:
            raise Overloaded(f"{used} pages are needed")
        held.num_rows = num_rows

    def _used_pages(self) -> int:
        return sum(self._pages(held.num_rows) for held in self.held.values())

    def _pages(self, num_rows: int) -> int:
        return -(-num_rows // self._info.page_size)

    def _require(self) -> None:
        if self._gone:
            raise NotReady("the fake target group is gone")


def _hash(*values: int) -> int:
    return int.from_bytes(blake2b(pack(f"<{len(values)}q", *values), digest_size=6).digest(), "little")
