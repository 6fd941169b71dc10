"""The proposer drafts what the next round will ask for and no more; rows nobody drafts from wait, and go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from driver import Driver, Stream
from engines import request, seeded, target
from recording import Recording

from seqmtp_serve.engine.feeder import DEFERRED_ROWS
from seqmtp_serve.engine.target import TargetEngine
from seqmtp_serve.ports import StepPlan, StepReport
from seqmtp_serve.request import Request


class Announcing:
    """A target whose plans say how deep the next round will be, in turn; each round then asks for that."""

    def __init__(self, engine: TargetEngine, depths: Sequence[int]) -> None:
        self.engine, self.depths = engine, depths
        self.asked = 0
        self.drafted: list[int] = []
        self.fed_rows = self.fed_bytes = 0

    def step(self, plan: StepPlan) -> StepReport:
        index = len(self.drafted)
        asked, self.asked = self.asked, self.depths[index % len(self.depths)]
        report = self.engine.step(
            replace(
                plan,
                prefill=tuple(replace(one, next_depth=self.asked) for one in plan.prefill),
                verify=tuple(replace(one, depth=asked, next_depth=self.asked) for one in plan.verify),
            )
        )
        self.fed_rows += report.costs.fed_rows
        self.fed_bytes += report.costs.fed_bytes
        assert 0 <= report.costs.feed <= report.costs.pack
        self.drafted += [row.drafted for row in report.rows if row.error is None]
        return report

    def check(self) -> None:
        self.engine.check()


def run(depths: Sequence[int], one: Request) -> tuple[Stream, Recording, list[int]]:
    link = Recording()
    announcing = Announcing(target(link, prompt_lookup=False), depths)
    (stream,) = Driver(announcing).run(one)  # type: ignore[arg-type]
    return stream, link, announcing.drafted


@pytest.mark.parametrize("one", [request(1, max_tokens=60), seeded(2, max_tokens=60)], ids=["greedy", "seeded"])
def test_text_and_drafts_are_those_of_eager_feeding(one: Request) -> None:
    """Rounds with drafts, without any, and with drafts again: the rows that waited make the same drafts."""
    eager, _, _ = run([3], one)
    masked, link, drafted = run([3, 0, 0, 0, 2, 1], one)
    assert masked.output == eager.output
    assert set(drafted) >= {0, 1, 2, 3}
    assert max(len(feed.next_ids) for feed in link.fed if not feed.reset) > 4  # what waited came in one feed
    assert all(feed.depth <= 3 for feed in link.fed)


def test_rows_that_waited_make_the_drafts_they_would_have_made_at_once() -> None:
    one = request(1, max_tokens=60)
    _, eager, _ = run([3], one)
    _, late, _ = run([0, 0, 3], one)
    both = eager.drafted.keys() & late.drafted.keys()
    assert len(both) > 3
    for base in both:
        first, second = eager.drafted[base], late.drafted[base]
        assert first[: len(second)] == second[: len(first)]


def test_nothing_is_fed_while_nobody_drafts_but_for_long_stretches() -> None:
    one = request(0, prompt_len=12, max_tokens=DEFERRED_ROWS + 20)
    stream, link, drafted = run([0], replace(one, eos_token_ids=()))
    assert set(drafted) == {0}
    assert len(stream.output) == DEFERRED_ROWS + 20
    prompt, *later = link.fed
    assert len(prompt.next_ids) == 12
    assert [len(feed.next_ids) for feed in later] == [DEFERRED_ROWS]
    assert not any(feed.depth for feed in link.fed)


def test_the_report_counts_the_rows_that_were_fed_and_their_bytes() -> None:
    link = Recording()
    announcing = Announcing(target(link), [3, 0, 1])
    Driver(announcing).run(request(1, max_tokens=30))  # type: ignore[arg-type]
    assert announcing.fed_rows == sum(len(feed.next_ids) for feed in link.fed) > 30
    assert announcing.fed_bytes == sum(feed.hidden.numel() * 4 for feed in link.fed)
