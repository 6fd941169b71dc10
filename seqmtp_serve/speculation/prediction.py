"""Drafts from a predicted output: where in the prediction the text is, and what follows there.

The prediction is a text the caller expects much of in the answer (an edited file). As tokens come, a pointer moves
along it. When a token differs, the place is found again by the last `NGRAM` tokens, first at or after the pointer,
since edits keep their order; until then the guess is that one token was replaced by another. What is proposed here is
verified like any draft, so a wrong place costs rows and never changes the text.

Depends on the output tokens alone, not on the rounds they came in. Compare prompt lookup decoding (Saxena, 2023:
github.com/apoorvumang/prompt-lookup-decoding), which searches the prompt anew for each round.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

NGRAM = 3
MAX_GUESSES = 2  # differing tokens in a row before the place counts as lost


class PredictionPointer:
    """The place of one output in its prediction. Mutable; `catch_up` with a growing output only."""

    def __init__(self, prediction_ids: Sequence[int]) -> None:
        self._ids = tuple(prediction_ids)
        self._after: dict[tuple[int, ...], list[int]] = defaultdict(list)  # n-gram -> where it ends, ascending
        for stop in range(NGRAM, len(self._ids) + 1):
            self._after[self._ids[stop - NGRAM : stop]].append(stop)
        self._num_seen = 0
        self._place: int | None = 0
        self._last_sure = 0
        self._num_guesses = 0

    @property
    def is_sure(self) -> bool:
        """Whether the newest token, or all of the newest few, were where the pointer is."""
        return self._place is not None and not self._num_guesses

    def catch_up(self, output_ids: Sequence[int]) -> None:
        """Follow the output tokens not seen yet."""
        for stop in range(self._num_seen + 1, len(output_ids) + 1):
            self._follow(output_ids[stop - 1], tuple(output_ids[max(0, stop - NGRAM) : stop]))
        self._num_seen = len(output_ids)

    def propose(self, num_tokens: int) -> tuple[int, ...]:
        """The next tokens of the prediction, at most so many; none when the place is lost or at its end."""
        return () if self._place is None else self._ids[self._place : self._place + num_tokens]

    def _follow(self, token: int, newest: tuple[int, ...]) -> None:
        if self._place is not None and self._place < len(self._ids) and self._ids[self._place] == token:
            self._be_sure(self._place + 1)
        elif stops := self._after.get(newest):
            index = bisect_left(stops, self._last_sure)
            self._be_sure(stops[min(index, len(stops) - 1)])
        else:
            self._num_guesses += 1
            if self._place is not None:
                self._place = None if self._num_guesses > MAX_GUESSES else self._place + 1

    def _be_sure(self, place: int) -> None:
        self._place = self._last_sure = place
        self._num_guesses = 0
