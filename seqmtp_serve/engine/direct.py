"""A proposer in the same thread: feeding computes the drafts at once. For one-process use and for tests."""

from __future__ import annotations

from collections.abc import Sequence

from seqmtp_serve.engine.proposer import ProposerEngine, Refusal
from seqmtp_serve.ports import Draft, FeedRows
from seqmtp_serve.request import Ref


class DirectProposer:
    """Implements `ports.Proposer` over an engine. `replace` is what a restarted peer looks like to its target."""

    def __init__(self, engine: ProposerEngine) -> None:
        self.engine = engine
        self.ready = True
        self._generation = 0
        self._drafts: dict[str, Draft] = {}
        self.refusals: list[Refusal] = []

    @property
    def generation(self) -> int:
        """Rises with each replacement."""
        return self._generation

    def feed(self, feeds: Sequence[FeedRows], closed: Sequence[str] = ()) -> None:
        """Run the passes and keep the drafts until they are collected."""
        for request_id in closed:
            self._drafts.pop(request_id, None)
        for answer in self.engine.propose(feeds, closed):
            if isinstance(answer, Draft):
                self._drafts[answer.ref.request_id] = answer
            else:
                self.refusals.append(answer)

    def collect(self, refs: Sequence[Ref], timeout_s: float) -> dict[str, Draft]:
        """Drafts for exactly these states; there is nothing to wait for."""
        found = {ref.request_id: self._drafts.get(ref.request_id) for ref in refs}
        return {ref.request_id: draft for ref in refs if (draft := found[ref.request_id]) and draft.ref == ref}

    def replace(self, engine: ProposerEngine) -> None:
        """Another engine, which knows no sequence."""
        self.engine = engine
        self._generation += 1
        self._drafts.clear()
