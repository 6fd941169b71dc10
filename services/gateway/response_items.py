"""The output items of a response that may think and call: a thought, messages and calls, as tokens bring them.

Each step gives the events that OpenAI's stream has for it. The same items make a whole response, a streamed one and one
that is read again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.choice import Delta
from services.gateway.job import Job
from services.gateway.logprobs import ScoredToken
from services.gateway.response_object import item_id, logprobs_of, text_part
from services.gateway.tools.parser import CallPart


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event without its number. Events of one kind that follow each other in a row become one."""

    name: str
    data: dict[str, Any]

    def __add__(self, more: Event) -> Event:
        """Both deltas as one."""
        merged = {**self.data, "delta": self.data["delta"] + more.data["delta"]}
        if "logprobs" in merged:
            merged["logprobs"] = [*self.data["logprobs"], *more.data["logprobs"]]
        return Event(name=self.name, data=merged)

    def continues(self, before: Event) -> bool:
        """Whether it is more of the same text."""
        key = "item_id"
        return self.name == before.name and "delta" in self.data and self.data[key] == before.data[key]


class OutputItems:
    """One response's items. `items` are the finished ones and the open one, as the response object has them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.items: list[dict[str, Any]] = []
        self._is_open = False
        self._is_cut = False  # the text ended amid a call

    def of(self, delta: Delta) -> Iterator[list[Event]]:
        """What each token of a row adds."""
        self._is_cut = delta.row.finish is not None and not delta.num_calls
        reasoning = delta.reasoning or ("",) * len(delta.texts)
        calls = delta.calls or ((),) * len(delta.texts)
        scored: Sequence[ScoredToken | None] = delta.scored or (None,) * len(delta.texts)
        for thought, text, score, parts in zip(reasoning, delta.texts, scored, calls, strict=True):
            yield [
                *(self._thought(thought) if thought else ()),
                *(self._text(text, score) if text else ()),
                *(event for part in parts for event in self._call(part)),
            ]

    def end(self, status: str) -> list[Event]:
        """The text is over: close what is open. A response has an item, if only an empty message."""
        opening = [] if self.items else list(self._open(self._message()))
        is_part = self._is_cut and status == "completed" and self._is("function_call")
        return [*opening, *self._close("incomplete" if is_part else status)]

    # ---- items

    def _thought(self, text: str) -> Iterator[Event]:
        if not self._is("reasoning"):
            part = {"type": "reasoning_text", "text": ""}
            yield from self._open(
                {"id": self._id("rs"), "type": "reasoning", "summary": [], "content": [part], "status": "in_progress"}
            )
        self.items[-1]["content"][0]["text"] += text
        yield Event(name="reasoning_text.delta", data={**self._where, "content_index": 0, "delta": text})

    def _text(self, text: str, score: ScoredToken | None) -> Iterator[Event]:
        if not self._is("message"):
            yield from self._open(self._message())
        logprobs = logprobs_of([] if score is None else [score])
        part = self.items[-1]["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        where = {**self._where, "content_index": 0}
        yield Event(name="output_text.delta", data={**where, "delta": text, "logprobs": logprobs})

    def _call(self, part: CallPart) -> Iterator[Event]:
        if part.id is not None:
            head = {"id": self._id("fc"), "type": "function_call", "call_id": part.id, "name": part.name}
            yield from self._open({**head, "arguments": "", "status": "in_progress"})
        if part.arguments:
            self.items[-1]["arguments"] += part.arguments
            yield Event(name="function_call_arguments.delta", data={**self._where, "delta": part.arguments})

    def _message(self) -> dict[str, Any]:
        part = text_part("", [])
        head = {"id": self._id("msg"), "type": "message", "role": "assistant", "status": "in_progress"}
        return {**head, "content": [part]}

    # ---- their beginnings and ends

    def _is(self, kind: str) -> bool:
        return self._is_open and bool(self.items[-1]["type"] == kind)

    def _id(self, prefix: str) -> str:
        """Ids differ by the item's place; the first message has the id that it has in a response of text alone."""
        place = len(self.items)
        return f"{prefix}-{item_id(self._job).partition('-')[2]}" + (f"-{place}" if place else "")

    @property
    def _where(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _open(self, item: dict[str, Any]) -> Iterator[Event]:
        yield from self._close("completed")
        self.items.append(item)
        self._is_open = True
        told = {**item, "content": []} if "content" in item else dict(item)
        yield Event(name="output_item.added", data={"output_index": len(self.items) - 1, "item": told})
        if item["type"] == "message":
            part = {**self._where, "content_index": 0, "part": text_part("", [])}
            yield Event(name="content_part.added", data=part)

    def _close(self, status: str) -> Iterator[Event]:
        if not self._is_open:
            return
        item = self.items[-1]
        item["status"], self._is_open = status, False
        where = {**self._where, "content_index": 0}
        if item["type"] == "message":
            part = item["content"][0]
            text = {"text": part["text"], "logprobs": part["logprobs"]}
            yield Event(name="output_text.done", data={**where, **text})
            yield Event(name="content_part.done", data={**where, "part": part})
        elif item["type"] == "reasoning":
            yield Event(name="reasoning_text.done", data={**where, "text": item["content"][0]["text"]})
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield Event(name="function_call_arguments.done", data={**self._where, **done})
        yield Event(name="output_item.done", data={"output_index": len(self.items) - 1, "item": dict(item)})
