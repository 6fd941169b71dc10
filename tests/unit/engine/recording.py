"""A proposer in the same thread that keeps what went through it."""

from __future__ import annotations

from collections.abc import Sequence

from engines import proposer

from seqmtp_serve.engine.direct import DirectProposer
from seqmtp_serve.ports import FeedRows


class Recording(DirectProposer):
    """Keeps what it was fed, and what it drafted after how many rows."""

    def __init__(self) -> None:
        super().__init__(proposer().engine)
        self.fed: list[FeedRows] = []
        self.drafted: dict[int, tuple[int, ...]] = {}

    def feed(self, feeds: Sequence[FeedRows], closed: Sequence[str] = ()) -> None:
        self.fed += feeds
        super().feed(feeds, closed)
        for one in feeds:
            if one.depth:
                self.drafted[one.first_base + len(one.next_ids)] = self._drafts[one.ref.request_id].tokens
