"""Chains end where a draft is not worth its row: what is left out, what is said of it; the text is the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

import pytest
from driver import Driver
from engines import request, seeded, target
from recording import Recording

from seqmtp_serve.engine.target import TargetEngine
from seqmtp_serve.ports import RowResult, StepPlan, StepReport
from seqmtp_serve.request import Request
from seqmtp_serve.speculation.draft_chances import GREEDY, PRIOR_DRAFTS, SAMPLED, num_worth

FLOORS = (0.0, 0.001, 0.05, 0.5, 0.09, 0.02, 1.5)  # 0: nothing is asked about the drafts; 1.5: none is worth its row


class Flooring:
    """A target whose plans ask for three drafts, with floors in turn: of rows, and of going on behind a draft."""

    def __init__(self, engine: TargetEngine, floors: Sequence[float], goes_on: Sequence[float]) -> None:
        self.engine = engine
        self._floors, self._goes_on = cycle(floors), cycle(goes_on)
        self.rounds: list[tuple[float, float, RowResult]] = []  # the floors of each round, and what came of it
        self._next_floor = 0.0

    def step(self, plan: StepPlan) -> StepReport:
        floor, went_on, self._next_floor = next(self._floors), self._next_floor, next(self._goes_on)
        report = self.engine.step(
            replace(
                plan,
                prefill=tuple(replace(one, next_depth=3, next_floor=self._next_floor) for one in plan.prefill),
                verify=tuple(
                    replace(one, depth=3, next_depth=3, floor=floor, next_floor=self._next_floor) for one in plan.verify
                ),
            )
        )
        if plan.verify:
            self.rounds += [(floor, went_on, row) for row in report.rows]
        return report

    def check(self) -> None:
        self.engine.check()


def run(
    one: Request, floors: Sequence[float], goes_on: Sequence[float], **fields: object
) -> tuple[list[int], Flooring]:
    flooring = Flooring(target(Recording(), **({"prompt_lookup": False} | fields)), floors, goes_on)
    (stream,) = Driver(flooring).run(one)  # type: ignore[arg-type]
    return list(stream.output), flooring


@pytest.mark.parametrize("one", [request(1, max_tokens=60), seeded(2, max_tokens=60)], ids=["greedy", "seeded"])
@pytest.mark.parametrize("lookup", [False, True])
def test_the_text_is_that_of_plain_decoding_whatever_is_left_out(one: Request, lookup: bool) -> None:
    (plain,) = Driver(target(None)).run(one)
    text, flooring = run(one, FLOORS, FLOORS[::-1], prompt_lookup=lookup)
    assert text == list(plain.output)
    left_out = [len(row.chances) - row.drafted for _, _, row in flooring.rounds if row.chances and not row.copied]
    assert max(left_out) > 0


def test_drafts_from_the_first_below_the_floor_are_left_out_and_said() -> None:
    _, flooring = run(request(1, max_tokens=100), FLOORS, FLOORS[::-1])
    judged = [(floor, went_on, row) for floor, went_on, row in flooring.rounds if row.chances]
    assert len(judged) > 20
    for floor, went_on, row in judged:
        assert row.drafted == num_worth(row.chances, floor)
        assert all(chance >= went_on for chance in row.chances[:-1]), "no draft behind one that is below"
        assert list(row.chances) == sorted(row.chances, reverse=True)
    assert {row.drafted for _, _, row in judged} >= {0, 1}
    assert {len(row.chances) for _, _, row in judged} >= {1, 2}
    unasked = [row for _, went_on, row in flooring.rounds if not went_on]
    assert unasked
    assert not any(row.chances for row in unasked)


def test_a_proposer_learns_from_the_text_that_comes_what_became_of_every_draft() -> None:
    """Also of those left out, as far as the next feed goes. The plain count: each chain beside that feed's text."""
    for one in (request(1, max_tokens=80), seeded(2, max_tokens=80)):
        link = Recording()
        flooring = Flooring(target(link, prompt_lookup=False), FLOORS[1:], [0.001])
        (stream,) = Driver(flooring).run(one)  # type: ignore[arg-type]
        text = (*one.prompt_ids, *stream.output)
        tried = right = 0
        fed_behind = {feed.first_base: len(feed.next_ids) for feed in link.fed}
        for base, chain in link.drafted.items():
            for token, true in zip(chain, text[base + 1 : base + 1 + fed_behind.get(base, 0)], strict=False):
                tried, right = tried + 1, right + (token == true)
                if token != true:
                    break
        (rates,) = link.engine._chances._rates.values()
        assert sum(rates.drafts) - PRIOR_DRAFTS * len(rates.drafts) == pytest.approx(tried)
        begun = [PRIOR_DRAFTS * share for share in _first(one)]
        assert sum(rates.right) - sum(begun) == pytest.approx(right)
        assert tried > 20


def _first(one: Request) -> Sequence[float]:
    return SAMPLED if one.params.temperature else GREEDY
