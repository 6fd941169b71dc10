"""The two dialects of an answer: what a choice looks like in chat and in completions, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from services.gateway.logprobs import ScoredToken, chat_logprobs, completion_logprobs
from services.gateway.tools.parser import CallPart

Calls = Sequence[CallPart]
Scored = Sequence[ScoredToken] | None  # None: no log-probabilities were asked for


class Shape(Protocol):
    """One dialect. `prefix` begins answer ids; the two names are OpenAI's `object` values."""

    prefix: str
    whole_name: str
    chunk_name: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of a first chunk without text, where the dialect has one."""
        ...

    def part(
        self, index: int, text: str, scored: Scored = None, calls: Calls = (), reasoning: str = ""
    ) -> dict[str, Any]:
        """The choice of a chunk with text."""
        ...

    def ending(self, index: int, finish: str | None, stop_reason: str | int | None) -> dict[str, Any]:
        """The choice of the chunk that says why the text ended; it carries no text."""
        ...

    def whole(
        self,
        index: int,
        text: str,
        finish: str | None,
        stop_reason: str | int | None,
        scored: Scored = None,
        calls: Calls = (),
        reasoning: str = "",
    ) -> dict[str, Any]:
        """The choice of an answer given at once; without `finish` it goes on."""
        ...


class ChatShape:
    """`/v1/chat/completions`."""

    prefix = "chatcmpl"
    whole_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any]:
        return self._chunk(index, {"role": "assistant", "content": ""})

    def part(
        self, index: int, text: str, scored: Scored = None, calls: Calls = (), reasoning: str = ""
    ) -> dict[str, Any]:
        delta: dict[str, Any] = _thought(reasoning)
        if text or not (calls or reasoning):
            delta["content"] = text
        if calls:
            delta["tool_calls"] = [_call(part, whole=False) for part in calls]
        return self._chunk(index, delta) | {"logprobs": _chat(scored)}

    def ending(self, index: int, finish: str | None, stop_reason: str | int | None) -> dict[str, Any]:
        return self._chunk(index, {}) | {"finish_reason": finish, "stop_reason": stop_reason}

    def whole(
        self,
        index: int,
        text: str,
        finish: str | None,
        stop_reason: str | int | None,
        scored: Scored = None,
        calls: Calls = (),
        reasoning: str = "",
    ) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, **_thought(reasoning)}
        if calls:
            message |= {"content": text or None, "tool_calls": [_call(part, whole=True) for part in calls]}
        return {
            "index": index,
            "message": message,
            "logprobs": _chat(scored),
            "finish_reason": finish,
            "stop_reason": stop_reason,
        }

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


class CompletionShape:
    """`/v1/completions`: chunks look like answers."""

    prefix = "cmpl"
    whole_name = "text_completion"
    chunk_name = "text_completion"

    def opening(self, index: int) -> None:
        return None

    def part(
        self, index: int, text: str, scored: Scored = None, calls: Calls = (), reasoning: str = ""
    ) -> dict[str, Any]:
        logprobs = None if scored is None else completion_logprobs(scored)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def ending(self, index: int, finish: str | None, stop_reason: str | int | None) -> dict[str, Any]:
        return self.whole(index, "", finish, stop_reason)

    def whole(
        self,
        index: int,
        text: str,
        finish: str | None,
        stop_reason: str | int | None,
        scored: Scored = None,
        calls: Calls = (),
        reasoning: str = "",
    ) -> dict[str, Any]:
        ending = {"finish_reason": finish, "stop_reason": stop_reason}
        return self.part(index, text, scored) | ending


def _call(part: CallPart, *, whole: bool) -> dict[str, Any]:
    """One call of a message, or what a chunk adds to it: id and name once, then arguments."""
    function = ({} if part.name is None else {"name": part.name}) | {"arguments": part.arguments}
    head = {} if whole else {"index": part.index}
    return head | ({} if part.id is None else {"id": part.id, "type": "function"}) | {"function": function}


def _thought(reasoning: str) -> dict[str, Any]:
    """vLLM's newer name and the one that DeepSeek's own API has."""
    return {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}


def _chat(scored: Scored) -> dict[str, Any] | None:
    return None if scored is None else chat_logprobs(scored)
