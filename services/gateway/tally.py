"""What an answer counted: usage, and speculation in the shape of vLLM's per-request metrics.

Only committed tokens count, the end-of-text token with them; drafts that were rejected never do. The first row is the
bootstrap (prefill) and no round. A round without drafts (depth 0, or the proposer was away) is a step of ordinary
decoding: it has no place in the acceptance histogram, nor has one whose drafts began with, or were, the request's own:
what its grammar forces, or its prediction.
"""

from __future__ import annotations

from typing import Any

from seqmtp_serve.request import CommittedRow
from services.gateway.job import Job


class Tally:
    """Counts of one job, as rows come."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._depth = max((request.params.max_depth for request in job.choices), default=0)
        self.num_output_tokens = self.num_reasoning_tokens = 0
        self._cached: list[int] = []  # of each choice that has begun
        self.accepted: list[int] = []  # for each round with drafts, in order
        self.drafted: list[int] = []
        self._predicted = [0, 0]  # drafted, accepted

    def add(self, row: CommittedRow, num_reasoning: int = 0) -> None:
        """Count one committed row; `num_reasoning` of its tokens are thought before the answer."""
        self.num_reasoning_tokens += num_reasoning
        self.num_output_tokens += len(row.tokens)
        if row.origins == "b":
            self._cached.append(row.cached)
        if row.predicted:
            self._predicted = [self._predicted[0] + row.drafted, self._predicted[1] + row.accepted]
        elif row.drafted > 0 and not row.forced:
            self.drafted.append(row.drafted)
            self.accepted.append(row.accepted)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object; with the fate of a prediction's tokens, for a request that brought one, and with the
        tokens of a thought, where those are told apart.

        Of several choices, each with the same prompt, the one that found least in a cache counts.
        """
        usage = {
            "prompt_tokens": self._job.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self._job.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": min(self._cached, default=0)},
        }
        details = {"reasoning_tokens": self.num_reasoning_tokens} if self._job.thought else {}
        if any(request.prediction_ids for request in self._job.choices):
            drafted, accepted = self._predicted
            details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        return {**usage, "completion_tokens_details": details} if details else usage

    def metrics(self) -> dict[str, Any]:
        """`{"speculative_decoding": …}`; null for several choices, whose rounds cannot be told apart in one histogram.

        `acceptance_histogram[j]` counts rounds with j accepted drafts, j from 0 to `num_spec_tokens`, the depth asked
        for. `mean_acceptance_length` = 1 + accepted / rounds is the verified E[R]; with no rounds it and the rate are
        null.
        """
        if len(self._job.choices) != 1:
            return {"speculative_decoding": None}
        depth, rounds = max([self._depth, *self.drafted]), len(self.drafted)
        accepted, drafted = sum(self.accepted), sum(self.drafted)
        return {
            "speculative_decoding": {
                "mean_acceptance_length": 1 + accepted / rounds if rounds else None,
                "draft_acceptance_rate": accepted / drafted if drafted else None,
                "acceptance_histogram": [self.accepted.count(number) for number in range(depth + 1)],
                "num_spec_steps": rounds,
                "num_accepted_draft_tokens": accepted,
                "num_draft_tokens": drafted,
                "num_spec_tokens": depth,
                "per_step_accepted": self.accepted,
                "per_step_drafted": self.drafted,
            }
        }
