"""One streamed answer, as its reader saw it: pure bookkeeping of (event, time) pairs, no network, no clock.

Times are milliseconds since the request was sent.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


class StreamFault(Exception):
    """The stream broke its own protocol, or told of an error. Such an answer counts as failed."""


@dataclass(slots=True)
class Answer:
    """Feed it every event of a stream with its arrival time; then `check()` it.

    `chunk_times` are those of the chunks that carried text: the role-only chunk, the finish chunk and the usage chunk
    are none. `end_time` is the last token's: that of the last chunk with text.
    """

    text: str = ""
    chunk_times: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    speculation: dict[str, Any] | None = None
    is_done: bool = False

    def feed(self, event: bytes, time_ms: float) -> bool:
        """Take one event (the bytes up to its blank line). False once the stream has said `[DONE]`.

        Raises StreamFault for an error event and for bytes that are no event.
        """
        data = b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
        if not data:
            return True  # a comment, or an id alone
        if data == b"[DONE]":
            self.is_done = True
            return False
        try:
            chunk = json.loads(data)
        except ValueError as error:
            raise StreamFault(f"an event is not JSON: {data[:80]!r}") from error
        if chunk.get("error"):
            raise StreamFault(f"error event: {chunk['error'].get('code')}: {chunk['error'].get('message')}")
        self._take(chunk, time_ms)
        return True

    def _take(self, chunk: dict[str, Any], time_ms: float) -> None:
        self.usage = chunk.get("usage") or self.usage
        self.speculation = (chunk.get("metrics") or {}).get("speculative_decoding") or self.speculation
        for choice in chunk.get("choices", ()):
            text = (choice.get("delta") or {}).get("content") or choice.get("text") or ""
            if text:
                self.text += text
                self.chunk_times.append(time_ms)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def check(self) -> None:
        """Raise StreamFault unless the stream was whole: text or tokens, a finish reason, usage, `[DONE]`."""
        for is_there, what in (
            (self.is_done, "[DONE]"),
            (self.finish_reason, "a finish reason"),
            (self.usage, "usage"),
        ):
            if not is_there:
                raise StreamFault(f"the stream ended without {what}")

    @property
    def num_tokens(self) -> int:
        """Output tokens, as the server counts them."""
        return int((self.usage or {}).get("completion_tokens", 0))

    @property
    def ttft_ms(self) -> float | None:
        """Time to the first chunk with text; None for an answer without any."""
        return self.chunk_times[0] if self.chunk_times else None

    @property
    def e2e_ms(self) -> float | None:
        """Time to the last chunk with text (the usage chunk does not count)."""
        return self.chunk_times[-1] if self.chunk_times else None

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first: (E2E - TTFT) / (tokens - 1)."""
        if len(self.chunk_times) < 2 or self.num_tokens < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.num_tokens - 1)

    @property
    def icl_ms(self) -> list[float]:
        """Gaps between chunks with text. One chunk is one verification round, so these are not per token."""
        return [late - early for early, late in zip(self.chunk_times, self.chunk_times[1:], strict=False)]
