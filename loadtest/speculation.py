"""What speculation yielded, pooled over rounds: the histogram of accepted drafts per round is the datum, E[R] derives.

Three figures that are often mixed up:

* verified: 1 + accepted / rounds. What the engine verified, tokens cut by a stop or a budget included.
* delivered: tokens given to the user after the first, over rounds. Lower on short answers.
* seen: the same measured without trusting the server, from chunks: (tokens - 1) / (chunks - 1).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from loadtest.answer import Answer


@dataclass(slots=True)
class Speculation:
    """Sums over answers. The first token of each comes from prefill, not from a round."""

    num_answers: int = 0
    num_tokens: int = 0
    num_round_tokens: int = 0  # delivered by rounds that had drafts
    num_rounds: int = 0
    num_drafted: int = 0
    num_chunks: int = 0
    histogram: list[int] = field(default_factory=list)  # [j]: rounds with j drafts accepted

    def add(self, answer: Answer) -> None:
        """Count one answer."""
        self.num_answers += 1
        self.num_tokens += answer.num_tokens
        self.num_chunks += len(answer.chunk_times)
        told = answer.speculation
        if not told or not told.get("num_spec_steps"):
            return
        num_verified = told["num_spec_steps"] + told["num_accepted_draft_tokens"]
        # Rounds without drafts (the proposer was away) are not told of; their tokens must not count for those that are.
        self.num_round_tokens += min(answer.num_tokens - 1, num_verified)
        self.num_rounds += told["num_spec_steps"]
        self.num_drafted += told["num_draft_tokens"]
        self._add_histogram(told["acceptance_histogram"])

    def merge(self, other: Speculation) -> None:
        """Count everything `other` counted."""
        for name in (
            "num_answers",
            "num_tokens",
            "num_round_tokens",
            "num_rounds",
            "num_drafted",
            "num_chunks",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self._add_histogram(other.histogram)

    def _add_histogram(self, histogram: list[int]) -> None:
        self.histogram += [0] * (len(histogram) - len(self.histogram))
        for number, rounds in enumerate(histogram):
            self.histogram[number] += rounds

    @property
    def num_accepted(self) -> int:
        """Drafts accepted by verification, those cut afterwards included."""
        return sum(number * rounds for number, rounds in enumerate(self.histogram))

    @property
    def verified(self) -> float | None:
        """E[R] as verified; None without rounds."""
        return 1.0 + self.num_accepted / self.num_rounds if self.num_rounds else None

    @property
    def delivered(self) -> float | None:
        """E[R] as delivered; None without rounds."""
        return self.num_round_tokens / self.num_rounds if self.num_rounds else None

    @property
    def seen(self) -> float | None:
        """E[R] from chunks alone; None when no answer had a second one."""
        gaps = self.num_chunks - self.num_answers
        return (self.num_tokens - self.num_answers) / gaps if gaps > 0 else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted; None without drafts."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """[j]: the share of rounds that accepted draft j (unconditional). Sums to verified - 1."""
        if not self.num_rounds:
            return []
        return [sum(self.histogram[position + 1 :]) / self.num_rounds for position in range(len(self.histogram) - 1)]
