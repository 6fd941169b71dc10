"""How deep the proposer drafts for the round after the one being planned: the controller, asked about live requests."""

from __future__ import annotations

from collections.abc import Sequence

from seqmtp_serve.frontier.depth import DepthController, Drafter
from seqmtp_serve.frontier.depth_choice import DepthChoice
from seqmtp_serve.frontier.ledger import Ledger
from seqmtp_serve.frontier.scheduler import BatchScheduler
from seqmtp_serve.frontier.sequence import Sequence as LiveSequence
from seqmtp_serve.target_link import TargetLink


class DraftDepths:
    """Asks `controller` for each plan. `reason` is why it chose as it did last."""

    def __init__(
        self, controller: DepthController, scheduler: BatchScheduler, target: TargetLink, ledger: Ledger
    ) -> None:
        self._controller, self._scheduler, self._target, self._ledger = controller, scheduler, target, ledger
        self.reason = "no step yet"

    def choose(self, coming: Sequence[LiveSequence]) -> DepthChoice:
        """The depths of these requests, which have a round to come; a fallback is counted."""
        choice = self._controller.choose(
            [_drafter(one) for one in coming],
            proposer_ready=self._target.proposer_ready,
            others_wait=bool(self._scheduler.waiting),
        )
        self._ledger.count("fallbacks", int(choice.fallback))
        self.reason = choice.reason
        return choice


def _drafter(sequence: LiveSequence) -> Drafter:
    return Drafter(
        limit=sequence.depth_limit,
        survival=sequence.survival,
        num_left=sequence.remaining,
        behind=sequence.behind,
        temperature=sequence.request.params.temperature,
    )
