"""A simulated target group with its proposer: the whole protocol, declared costs, synthetic acceptance, no model.

To load everything around a model (gateway, coordinator, store, the wire) far beyond what this machine could compute.
The text says nothing but is known beforehand (`simulated_text`), so a token lost, repeated or altered shows. Nothing
enables it but its own setting, and whatever tells of the model tells that it is simulated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from struct import pack

from seqmtp_serve.fake import FakeTargetGroup
from seqmtp_serve.ports import StepCosts, StepPlan, StepReport, TargetInfo
from seqmtp_serve.request import Request

MODEL = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCosts:
    """Milliseconds of one step: of its pass, more for each row in it, and of drafting each position of a chain.

    `acceptance[j]`: probability that draft j is accepted once all before it were; beyond its end, that of its last.
    """

    step_ms: float = 25.0
    row_ms: float = 0.0
    draft_ms: float = 1.0
    acceptance: tuple[float, ...] = (0.8, 0.7, 0.6)

    def of(self, plan: StepPlan) -> StepCosts:
        """The declared costs of a step."""
        num_rows = sum(item.depth + 1 for item in plan.verify) + sum(item.stop - item.start for item in plan.prefill)
        if not num_rows:
            return StepCosts()
        wait_ms = self.draft_ms * max((item.depth for item in plan.verify), default=0)
        return StepCosts(forward=self.step_ms + self.row_ms * num_rows, draft_wait=wait_ms, num_rows=num_rows)


def simulated_text(request: Request, start: int, count: int, vocab_size: int) -> list[int]:
    """Output tokens `start`, … of a request: a keyed sequence, the same whatever was drafted.

    From the upper half of the vocabulary, where no tokenizer has its special tokens; never one that ends the text.
    """
    first = int.from_bytes(blake2b(pack(f"<{len(request.prompt_ids)}I", *request.prompt_ids), digest_size=6).digest())
    stops = {*request.eos_token_ids, *request.params.stop_token_ids}
    allowed = [token for token in range(vocab_size // 2, vocab_size) if token not in stops]
    return [allowed[(first + 7919 * position) % len(allowed)] for position in range(start, start + count)]


class SimulatedEngine(FakeTargetGroup):
    """An engine for the target process (`step`, `info`, `is_idle`, `check`). A step takes its declared time."""

    def __init__(
        self,
        info: TargetInfo,
        costs: SimulatedCosts,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(info)
        self._costs, self._clock, self._sleep = costs, clock, sleep

    def info(self) -> TargetInfo:  # type: ignore[override]  # an engine answers at once
        """What the group can do."""
        return self._info

    def step(self, plan: StepPlan) -> StepReport:  # type: ignore[override]
        """Run the plan, then wait until its declared time is over."""
        started = self._clock()
        costs = self._costs.of(plan)
        report = replace(self.run(plan), costs=costs)
        self._sleep(max(0.0, (costs.forward + costs.draft_wait) / 1e3 - (self._clock() - started)))
        return report

    @property
    def is_idle(self) -> bool:
        """Whether no request is admitted."""
        return not self.held

    def check(self) -> None:
        """Nothing is held when idle."""
        assert not self.held

    def _note(self, plan: StepPlan) -> None:
        pass  # a long run would keep every plan

    def _num_accepted(self, request: Request, output_ids: Sequence[int], depth: int) -> int:
        """Drawn from the request and its position: a replay draws the same."""
        accepted = 0
        while accepted < depth and self._draw(request, len(output_ids), accepted) < self._rate(accepted):
            accepted += 1
        return accepted

    def _next_tokens(self, request: Request, output_ids: Sequence[int], count: int) -> list[int]:
        return simulated_text(request, len(output_ids), count, self._info.vocab_size)

    def _rate(self, position: int) -> float:
        rates = self._costs.acceptance
        return rates[min(position, len(rates) - 1)]

    def _draw(self, request: Request, output_len: int, position: int) -> float:
        key = f"{request.request_id} {output_len} {position}".encode()
        return int.from_bytes(blake2b(key, digest_size=4).digest()) / 2**32
