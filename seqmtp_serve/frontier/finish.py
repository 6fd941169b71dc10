"""Where a text ends, decided one token at a time, before anything is committed.

Order at each token: EOS, stop token ids, stop strings, budget. A token may end the text by a stop only when more than
`min_tokens` tokens are out, itself included: the target masks EOS and stop ids below that. A stop string may begin and
end inside different tokens and rounds; the one whose last character comes first wins (of two that end together, the
longer), so the cut does not depend on how the text was split into tokens.

`FinishChecker` decides (coordinator), `TextAssembler` also says what may be shown (gateway): one search, one cut.
"""

from __future__ import annotations

from dataclasses import dataclass

from seqmtp_serve.errors import IllegalTransition, InvalidField
from seqmtp_serve.request import FinishReason, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """How a text ended. `text_end` is where the shown text stops, in characters of all pieces joined."""

    reason: FinishReason
    stop_reason: str | int | None
    text_end: int


class FinishChecker:
    """Takes (token, text piece) pairs in order and says when the text is over.

    A piece is what the token adds to the decoded text: empty for special tokens and inside an unfinished character.
    Memory is bounded: only a tail of the text, one character shorter than the longest stop string, is kept.
    """

    def __init__(self, request: Request) -> None:
        params = request.params
        if any(not stop for stop in params.stop):
            raise InvalidField("a stop string cannot be empty", param="stop")
        if params.max_tokens < 1:
            raise InvalidField("max_tokens must be at least 1", param="max_tokens")
        self._params = params
        self._eos = frozenset(() if params.ignore_eos else request.eos_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self.tail_len = max((len(stop) for stop in params.stop), default=1) - 1
        self._tail = ""
        self.text_len = 0
        self.num_tokens = 0
        self.finish: Finish | None = None

    def push(self, token_id: int, piece: str) -> Finish | None:
        """Add one token. Returns the finish when this token ends the text; raises IllegalTransition after that."""
        if self.finish is not None:
            raise IllegalTransition("a token came after the end of the text")
        before = self.text_len
        self.num_tokens += 1
        self.text_len += len(piece)
        if self.num_tokens > self._params.min_tokens:
            self.finish = self._stop_token(token_id, before) or self._stop_string(piece, before)
        if self.finish is None and self.num_tokens >= self._params.max_tokens:
            self.finish = Finish(reason=FinishReason.LENGTH, stop_reason=None, text_end=self.text_len)
        self._tail = (self._tail + piece)[-self.tail_len :] if self.tail_len else ""
        return self.finish

    def _stop_token(self, token_id: int, before: int) -> Finish | None:
        if token_id in self._eos:
            return Finish(reason=FinishReason.STOP, stop_reason=None, text_end=before)
        if token_id in self._stop_ids:
            end = self.text_len if self._params.include_stop_str_in_output else before
            return Finish(reason=FinishReason.STOP, stop_reason=token_id, text_end=end)
        return None

    def _stop_string(self, piece: str, before: int) -> Finish | None:
        """The stop string that ends first among those that end inside `piece`."""
        window, old = self._tail + piece, len(self._tail)
        hits = []
        for stop in self._params.stop:
            start = window.find(stop, max(0, old - len(stop) + 1))
            if start >= 0:
                hits.append((start + len(stop), start, stop))
        if not hits:
            return None
        end, start, stop = min(hits)
        shown = end if self._params.include_stop_str_in_output else start
        return Finish(reason=FinishReason.STOP, stop_reason=stop, text_end=before - old + shown)


class TextAssembler:
    """The text a reader may see: everything that cannot turn out to be the head of a stop string."""

    def __init__(self, request: Request) -> None:
        self._checker = FinishChecker(request)
        self._hold = self._checker.tail_len
        self._held = ""
        self._shown_len = 0

    @property
    def finish(self) -> Finish | None:
        """Set once a token ended the text."""
        return self._checker.finish

    def push(self, token_id: int, piece: str) -> str:
        """Add one token; returns what may be shown now, which is everything left when this token ends the text."""
        finish = self._checker.push(token_id, piece)
        self._held += piece
        end = self._checker.text_len - self._hold if finish is None else finish.text_end
        return self._show(end - self._shown_len)

    def flush(self) -> str:
        """What is held back, for a text that was ended from outside (cancelled, failed)."""
        return self._show(len(self._held)) if self.finish is None else ""

    def _show(self, num_chars: int) -> str:
        text = self._held[: max(num_chars, 0)]
        self._held = self._held[len(text) :]
        self._shown_len += len(text)
        return text
