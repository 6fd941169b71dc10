"""A service whose texts and costs are known, driven by a depth controller or at a fixed depth: what each would take.

The texts are real ones: at each place of 16 answers of each kind, how many drafts of the module in a row were the
text, and how sure it was of each (`accepted_drafts.json`, the prompts of `seqmtp bench speculation`). So a round of
depth d from a place is the same round every time, and depths are compared on the same text, which ends where it ended.
Times are true ones added up; the controller sees them with the noise of a busy machine, whose speed drifts besides.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import exp, sin
from pathlib import Path
from random import Random

from seqmtp_serve.frontier.depth import DepthController, Drafter
from seqmtp_serve.frontier.depth_choice import floors
from seqmtp_serve.frontier.ledger import RoundCosts
from seqmtp_serve.frontier.survival import Survival
from seqmtp_serve.ports import RowResult, StepCosts, StepPlan, StepReport, Verify
from seqmtp_serve.request import Ref, SamplingParams
from seqmtp_serve.speculation.draft_chances import DraftChances, num_worth

MAX_DEPTH = 3
MAX_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """`accepted[p]`: how many drafts in a row are the text after p + 1 tokens, and `confidences[p]` of each of them.

    `sampled`: it is drawn, not greedy.
    """

    prompt_len: int
    accepted: tuple[int, ...]
    confidences: tuple[tuple[float, ...], ...]
    sampled: bool = False

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=2.0 * self.sampled, seed=7, seeded=self.sampled)

    @property
    def num_tokens(self) -> int:
        return min(MAX_TOKENS, len(self.accepted) + MAX_DEPTH)

    def accepts(self, place: int, depth: int) -> int:
        return min(depth, self.accepted[place]) if place < len(self.accepted) else 0


def _ref(place: int) -> Ref:
    return Ref(request_id=str(place), epoch=1, version=1, digest=bytes(16))


def read_texts() -> dict[str, list[Text]]:
    """By kind."""
    path = Path(__file__).parent / "accepted_drafts.json"
    return {
        kind: [
            Text(
                prompt_len=prompt_len,
                accepted=tuple(map(int, places)),
                confidences=_confidences(digits),
                sampled=kind == "random",
            )
            for prompt_len, places, digits in texts
        ]
        for kind, texts in json.loads(path.read_text()).items()
    }


def _confidences(digits: str) -> tuple[tuple[float, ...], ...]:
    """Two digits each, of a hundred; so many in a row as a chain is long."""
    each = [int(digits[at : at + 2]) / 100 for at in range(0, len(digits), 2)]
    return tuple(tuple(each[at : at + MAX_DEPTH]) for at in range(0, len(each), MAX_DEPTH))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrueCosts:
    """Milliseconds: of a step, and more for each sequence, position of the chain, draft, and so on.

    A draft takes `verify` in the target's pass of a large batch, and less in that of a small one.
    """

    step: float
    sequence: float
    drafting: float
    position: float
    draft: float
    verify: float
    behind_row: float
    prefill_row: float
    sampled_token: float

    def forward_ms(self, batch: int, drafts: int, prefill_rows: int) -> float:
        verify = self.verify * drafts * batch / (batch + 1)
        return self.step + batch * self.sequence + verify + prefill_rows * self.prefill_row

    def drafting_ms(self, depth: int, drafts: int, behind: int) -> float:
        fixed = self.drafting + depth * self.position if depth else 0.0
        return fixed + drafts * self.draft + behind * self.behind_row


# SmolLM2 int8 on 2 cores of an AMD EPYC (Zen 5), everything in one process: medians of its steps
EPYC = TrueCosts(
    step=9.4,
    sequence=1.6,
    drafting=0.4,
    position=0.85,
    draft=0.18,
    verify=0.8,
    behind_row=0.015,
    prefill_row=0.8,
    sampled_token=0.7,
)

# The same with AVX2 only: a draft is dearer in a large batch (docs/bench/depth-control-*-avx2.json), by eye
OLD_EPYC = TrueCosts(
    step=40.0,
    sequence=8.0,
    drafting=1.0,
    position=1.5,
    draft=0.5,
    verify=3.4,
    behind_row=0.05,
    prefill_row=3.5,
    sampled_token=2.0,
)


@dataclass
class Noise:
    """Of each step: `spread` around it, now and then a delay; a speed that wanders by `drift` either way."""

    random: Random
    spread: float = 0.06
    delays: float = 0.02
    drift: float = 0.08
    num_steps: int = 0

    def factor(self) -> float:
        self.num_steps += 1
        delayed = 1.0 if self.random.random() < self.delays else 0.0
        return (exp(self.random.gauss(0.0, self.spread)) + delayed) * (1 + self.drift * sin(self.num_steps / 170.0))


@dataclass
class Live:
    text: Text
    survival: Survival = field(default_factory=lambda: Survival(64.0))
    out: int = 0  # tokens; 0: its prompt is to be computed
    known: int = 0  # positions that the module has computed
    next_depth: int = 0
    next_floors: tuple[float, float] = (0.0, 0.0)

    @property
    def depth_limit(self) -> int:
        return max(0, min(MAX_DEPTH, MAX_TOKENS - self.out - 1))


@dataclass
class Service:
    """One that runs texts to their end, as many at once as it is told, and says how long that takes."""

    controller: DepthController
    costs: TrueCosts
    noise: Noise
    overhead_ms: float = 0.0  # of a decision
    chosen: list[tuple[int, int]] = field(default_factory=list)  # batch and depth of each step
    chances: DraftChances = field(default_factory=DraftChances)

    def run(self, texts: Sequence[Text], concurrency: int) -> float:
        waiting: Iterator[Text] = iter(texts)
        live: list[Live] = []
        total_ms = 0.0
        while True:
            while len(live) < concurrency and (text := next(waiting, None)) is not None:
                live.append(Live(text))
            if not live:
                return total_ms
            total_ms += self._step(live)
            live = [one for one in live if one.out < one.text.num_tokens]

    def _step(self, live: list[Live]) -> float:
        rounds = [one for one in live if one.out]
        prompts = [one for one in live if not one.out]
        depths = [min(one.next_depth, one.depth_limit) for one in rounds]
        drafters = [self.drafter(one) for one in rounds + prompts]
        choice = self.controller.choose(drafters, proposer_ready=True)
        chains = [self.chain(one, depth) for one, depth in zip(rounds, depths, strict=True)]
        verified = [num_worth(chain, one.next_floors[0]) for one, chain in zip(rounds, chains, strict=True)]
        made = [len(chain) for chain in chains]
        accepted = [one.text.accepts(one.out - 1, num) for one, num in zip(rounds, verified, strict=True)]
        behind = sum(self._behind(one) for one, depth in zip(rounds, depths, strict=True) if depth)
        rows = tuple(
            RowResult(ref=_ref(place), tokens=(0,) * (some + 1), drafted=num, accepted=some, chances=chain)
            for place, (some, num, chain) in enumerate(zip(accepted, verified, chains, strict=True))
        )
        forward_ms = self.costs.forward_ms(len(rounds), sum(verified), sum(one.text.prompt_len for one in prompts))
        drafting_ms = self.costs.drafting_ms(max(made, default=0), sum(made), behind)
        select_ms = self.costs.sampled_token * sum(
            some + 1 for one, some in zip(rounds, accepted, strict=True) if one.text.sampled
        )
        for one, depth, some, num, chain in zip(rounds, depths, accepted, verified, chains, strict=True):
            if depth:
                one.known = one.text.prompt_len + one.out - 1
            one.survival.add(depth, some, len(chain), num)
            one.out += some + 1
        for one in prompts:
            one.out = 1
        for place, (one, depth) in enumerate(zip(rounds + prompts, choice.depths, strict=True)):
            one.next_depth, one.next_floors = depth, floors(choice, place)
        noise = self.noise.factor()
        is_plain = not any(depths)
        costs = RoundCosts(
            main=forward_ms * noise if is_plain else 0.0,
            verify=0.0 if is_plain else forward_ms * noise,
            mtp=drafting_ms * noise,
            pack=select_ms * noise,
        )
        self.controller.observe(
            StepPlan(
                step_id=1, verify=tuple(Verify(ref=_ref(place), depth=depth) for place, depth in enumerate(depths))
            ),
            StepReport(
                step_id=1,
                rows=rows,
                costs=StepCosts(forward=forward_ms * noise, draft_wait=drafting_ms * noise, select=select_ms * noise),
                free_pages=0,
                proposer_ready=True,
            ),
            None if prompts else costs,
            behind=behind,
        )
        self.chosen.append((len(rounds), max(depths, default=0)))
        return forward_ms + drafting_ms + select_ms + self.overhead_ms

    def chain(self, one: Live, depth: int) -> tuple[float, ...]:
        """The chances of the drafts that are made; what became of them is learned at once, not with the next feed."""
        place, (_, goes_on) = one.out - 1, one.next_floors
        if place >= len(one.text.confidences):
            return (1.0,) * depth  # the text ends: as `accepts` has it
        params, found = one.text.params, list[float]()
        for confidence in one.text.confidences[place][:depth]:
            found.append((found[-1] if found else 1.0) * self.chances.of(params, confidence))
            if found[-1] < goes_on:
                break
        right = [number < one.text.accepts(place, depth) for number in range(len(found))]
        self.chances.learn(params, [True] * len(found), one.text.confidences[place], right)
        return tuple(found)

    def drafter(self, one: Live) -> Drafter:
        return Drafter(
            limit=one.depth_limit,
            survival=one.survival,
            num_left=MAX_TOKENS - one.out,
            behind=self._behind(one),
            temperature=2.0 * one.text.sampled,
        )

    @staticmethod
    def _behind(one: Live) -> int:
        return one.text.prompt_len + one.out - 1 - one.known
