"""Faults put into the engine's own state, and what notices each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from driver import Driver, Stream
from engines import TARGET, proposer, request, target

from seqmtp_serve import oracle
from seqmtp_serve.model.synthetic import TINY
from seqmtp_serve.ports import Draft, FeedRows
from seqmtp_serve.request import Ref


class Overheard:
    """Passes everything on to a proposer in the same thread and keeps every feed."""

    def __init__(self) -> None:
        self._inner = proposer()
        self.feeds: list[FeedRows] = []

    ready = True
    generation = 0

    def feed(self, feeds: Sequence[FeedRows], closed: Sequence[str] = ()) -> None:
        self.feeds += feeds
        self._inner.feed(feeds, closed)

    def collect(self, refs: Sequence[Ref], timeout_s: float) -> dict[str, Draft]:
        return self._inner.collect(refs, timeout_s)


@pytest.mark.covers(77, 125)
def test_a_last_token_that_counts_as_computed_is_noticed() -> None:
    """A correction or bonus was sampled, not computed: the caches cover P, without it."""
    engine, stream = target(proposer()), Stream.open(request(1))
    driver = Driver(engine)
    for _ in range(3):
        driver.step([stream])
    engine.check()
    (sequence,) = engine._sequences.values()
    sequence.length += 1
    with pytest.raises(AssertionError, match="must cover exactly P"):
        engine.check()


@pytest.mark.covers(140)
@pytest.mark.parametrize("lost", [False, True])
def test_a_hit_needs_the_hidden_rows_beside_the_pages(lost: bool) -> None:
    """Keys and values alone give the text; the module would be fed nothing sensible at the boundary."""
    link = Overheard()
    engine = target(link)  # type: ignore[arg-type]
    driver = Driver(engine)
    first = driver.run(request(1, prompt_len=40))[0]
    seen = (*first.request.prompt_ids, *first.output)
    turn = replace(first.request, request_id="next", prompt_ids=(*seen, 5, 22, 8, 3))
    if lost:
        engine.cache.hidden_Sd.zero_()
    link.feeds.clear()
    hit = driver.run(turn)[0]
    assert sum(row.cached for row in hit.rows) > 0
    assert hit.output == oracle.generate(TARGET, TINY, turn)
    opening = link.feeds[0]
    last = opening.first_base + len(opening.hidden)
    expected = oracle.forward(TARGET, TINY, list(turn.prompt_ids)[:last])[1][opening.first_base :]
    assert torch.allclose(opening.hidden, expected, atol=1e-4) is not lost
