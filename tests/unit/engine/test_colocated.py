"""The proposer on a thread beside the target: the text of plain decoding, with drafts, and without once it breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from driver import Driver
from engines import TARGET, proposer, request, seeded, target

from seqmtp_serve import oracle
from seqmtp_serve.engine.proposer import ProposerEngine
from seqmtp_serve.model.synthetic import TINY
from seqmtp_serve.ports import Draft, FeedRows
from seqmtp_serve.request import Request
from services.target.colocated import ColocatedProposer


class BreaksAfter:
    """An engine whose pass raises after some good ones."""

    def __init__(self, engine: ProposerEngine, passes: int) -> None:
        self._engine, self._left = engine, passes

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def propose(self, feeds: Sequence[FeedRows], closed: Sequence[str] = ()) -> Sequence[Draft]:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("out of luck")
        return self._engine.propose(feeds, closed)  # type: ignore[return-value]


@pytest.mark.covers(72, 157)
@pytest.mark.parametrize("make", [request, seeded], ids=["greedy", "seeded"])
def test_text_is_the_oracles_and_drafts_are_accepted(make: Callable[[int], Request]) -> None:
    requests = [make(index) for index in range(3)]
    engine = proposer().engine
    link = ColocatedProposer(engine)
    streams = Driver(target(link), chunk=7).run(*requests)
    assert [stream.output for stream in streams] == [oracle.generate(TARGET, TINY, one) for one in requests]
    rows = [row for stream in streams for row in stream.rows]
    assert 0 < sum(row.accepted for row in rows) < sum(row.drafted for row in rows)
    link.close()
    engine.check()
    assert engine.num_sequences == 0


def test_a_module_that_breaks_costs_drafts_and_says_so() -> None:
    one = request(1, max_tokens=40)
    link = ColocatedProposer(BreaksAfter(proposer().engine, 5))
    (stream,) = Driver(target(link, prompt_lookup=False)).run(one)
    assert stream.output == oracle.generate(TARGET, TINY, one)
    assert stream.rows[1].drafted == 3
    assert [row.drafted for row in stream.rows[-5:]] == [0] * 5
    assert not link.ready
    assert "out of luck" in link.detail
    link.close()


def test_a_sequence_it_has_no_pages_for_decodes_without_drafts() -> None:
    one = request(1, max_tokens=40)
    link = ColocatedProposer(proposer(num_pages=3).engine)
    (stream,) = Driver(target(link, prompt_lookup=False)).run(one)
    assert stream.output == oracle.generate(TARGET, TINY, one)
    assert stream.rows[-1].drafted == 0
    assert link.ready
    link.close()
