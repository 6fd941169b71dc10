"""What a round starts from: the frontier and its drafts on the cached prefix, and the hidden row last kept."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from driver import Driver, Stream
from engines import TARGET, proposer, request, seeded, target
from torch import Tensor

from seqmtp_serve import oracle
from seqmtp_serve.model.attention import Span
from seqmtp_serve.model.synthetic import TINY
from seqmtp_serve.ports import Draft, FeedRows
from seqmtp_serve.request import Ref, Request


class Overheard:
    """Passes everything on to a proposer in the same thread and keeps what went by."""

    def __init__(self) -> None:
        self._inner = proposer()
        self.feeds: list[FeedRows] = []
        self.drafts: dict[str, Draft] = {}

    ready = True
    generation = 0

    def feed(self, feeds: Sequence[FeedRows], closed: Sequence[str] = ()) -> None:
        self.feeds = list(feeds)
        self._inner.feed(feeds, closed)

    def collect(self, refs: Sequence[Ref], timeout_s: float) -> dict[str, Draft]:
        self.drafts = self._inner.collect(refs, timeout_s)
        return self.drafts


@pytest.mark.covers(12, 74, 75)
@pytest.mark.parametrize("wanted", [request(max_tokens=20), seeded(1, max_tokens=20)], ids=["greedy", "seeded"])
def test_every_round_enters_with_prefix_frontier_and_parent(wanted: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Overheard()
    engine = target(link)  # type: ignore[arg-type]
    passes: list[tuple[list[int], list[Span]]] = []
    plain = engine.trunk.forward

    def forward(token_ids: Sequence[int], spans: list[Span], pool_LSE: Tensor) -> Tensor:
        passes.append((list(token_ids), spans))
        return plain(token_ids, spans, pool_LSE)

    monkeypatch.setattr(engine.trunk, "forward", forward)
    driver, stream = Driver(engine), Stream.open(wanted)
    num_rejected = num_drafted = 0
    while not stream.done:
        known, is_round = [*wanted.prompt_ids, *stream.output], bool(stream.output)
        driver.step([stream])
        row, (token_ids, (span,)) = stream.rows[-1], passes[-1]
        if is_round:
            draft = link.drafts[wanted.request_id]
            assert token_ids == [known[-1], *draft.tokens]  # f, y1 .. yK
            assert (span.start, span.num_rows) == (len(known) - 1, 1 + row.drafted)  # right after P
            num_drafted += row.drafted
            num_rejected += row.accepted < row.drafted
        after = [*known, *row.tokens]
        for feed in link.feeds:  # none once the budget is spent
            hidden_Td = oracle.forward(TARGET, TINY, after[:-1])[1]
            assert (
                feed.first_base + len(feed.hidden) == len(after) - 1
            )  # up to the end of the new P, never the frontier
            assert feed.next_ids[-1] == after[-1]
            torch.testing.assert_close(feed.hidden[-1], hidden_Td[-1], rtol=1e-4, atol=1e-4)  # before the final norm
    assert num_drafted > 10
    assert num_rejected > 0
