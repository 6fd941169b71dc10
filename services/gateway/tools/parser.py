"""Tool calls out of a text that comes in pieces: the same calls however it was cut.

A call exists from the moment its head is well formed (a known function's name, and arguments that begin as an object):
then its id and name go out, and the arguments follow as they come. Before that everything is held; what does not become
a call is content, tags included. Arguments that turn out to be no JSON are given as they are, up to the closing tag: a
client has to expect that of any model. White space before calls is dropped.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto

from services.gateway.tools.dialects import Dialect, whole_calls

JSON_OUTSIDE_STRINGS = frozenset(' \t\r\n0123456789+-.,:{}[]"truefalsnE')


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPart:
    """What a piece of text adds to call `index`: `id` and `name` once, at its beginning, then arguments."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a piece of text adds: to the content, and to calls in their order (one part a call at most)."""

    content: str = ""
    calls: tuple[CallPart, ...] = ()

    def __add__(self, more: Said) -> Said:
        """Both, one after the other; parts of the same call become one."""
        calls = list(self.calls)
        for part in more.calls:
            if calls and calls[-1].index == part.index:
                calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + part.arguments)
            else:
                calls.append(part)
        return Said(content=self.content + more.content, calls=tuple(calls))


def joined(parts: Iterable[Iterable[CallPart]]) -> tuple[CallPart, ...]:
    """Parts that follow each other, those of the same call as one. Pure."""
    return sum((Said(calls=tuple(part)) for part in parts), Said()).calls


class _State(Enum):
    TEXT = auto()
    HEAD = auto()  # after an opening tag, nothing decided
    ARGUMENTS = auto()
    BROKEN = auto()  # arguments that are no JSON: verbatim up to the closing tag
    TAIL = auto()  # after the arguments' last brace


class ToolParser:
    """One choice's text. `names` are the declared functions; `one_call`: further calls are dropped.

    Call ids are made from `key`, so that a stream that is resumed has the same ones.
    """

    def __init__(self, dialect: Dialect, names: frozenset[str], *, key: str, one_call: bool = False) -> None:
        self._dialect, self._names, self._key, self._one_call = dialect, names, key, one_call
        self._openers = (dialect.open, *dialect.around)
        self._state = _State.TEXT
        self._held = ""
        self._gap = ""  # white space before the opening tag: content, if no call follows it
        self._depth = 0
        self._in_string = self._escaped = False
        self._said = Said()
        self.num_calls = 0
        self.is_cut = False  # the text ended amid the arguments of a call

    def push(self, text: str) -> Said:
        """What more is known now that `text` has come."""
        self._held += text
        while self._step():
            pass
        return self._take()

    def finish(self) -> Said:
        """The text is over: what was held, as what it is."""
        held, self._held = self._held, ""
        self.is_cut = self._state is _State.ARGUMENTS and (self.num_calls == 1 or not self._one_call)
        match self._state:
            case _State.TEXT:
                self._content(held)
            case _State.HEAD:
                self._decide(held, closed=False)
            case _State.BROKEN | _State.ARGUMENTS:
                self._argue(held)
            case _State.TAIL:
                rest = held[: len(held) - _partial(held, (self._dialect.close,))]
                self._leave(rest)
        self._state = _State.TEXT
        return self._take()

    # ---- the automaton -----------------------------------------------------------------------------------------

    def _step(self) -> bool:
        """Consume something of what is held. False: more has to come first."""
        match self._state:
            case _State.TEXT:
                return self._read_text()
            case _State.HEAD:
                return self._read_head()
            case _State.ARGUMENTS:
                return self._read_arguments()
            case _State.BROKEN:
                return self._read_broken()
            case _State.TAIL:
                return self._read_tail()

    def _read_text(self) -> bool:
        places = [(place, tag) for tag in self._openers if (place := self._held.find(tag)) >= 0]
        if places:
            place, tag = min(places)
            before, self._held = self._held[:place], self._held[place + len(tag) :]
            self._content(before.rstrip())
            if tag == self._dialect.open:
                self._gap, self._state = before[len(before.rstrip()) :], _State.HEAD
            return True
        safe = self._held[: len(self._held) - _partial(self._held, self._openers)].rstrip()
        self._content(safe)
        self._held = self._held[len(safe) :]
        return False

    def _read_head(self) -> bool:
        close = self._held.find(self._dialect.close)
        if self._begin(self._dialect.head, close):
            return True
        if close < 0:
            return False
        self._decide(self._held[:close], closed=True)
        self._held = self._held[close + len(self._dialect.close) :]
        self._state = _State.TEXT
        return True

    def _begin(self, pattern: re.Pattern[str], close: int) -> bool:
        """Open a call if its head is here, before any closing tag."""
        found = pattern.match(self._held)
        if found is None or found.lastgroup is None or 0 <= close < found.end():
            return False
        name = found[found.lastgroup]
        if name not in self._names:
            return False
        self._open(name)
        self._held = self._held[found.end() :]
        self._depth, self._in_string, self._escaped = 0, False, False
        self._state = _State.ARGUMENTS
        return True

    def _read_arguments(self) -> bool:
        for place, char in enumerate(self._held):
            if self._in_string:
                ends = char == '"' and not self._escaped
                self._escaped = char == "\\" and not self._escaped
                self._in_string = not ends
                continue
            if char not in JSON_OUTSIDE_STRINGS:
                self._argue(self._held[:place])
                self._held, self._state = self._held[place:], _State.BROKEN
                return True
            self._in_string = char == '"'
            self._depth += (char in "{[") - (char in "}]")
            if self._depth == 0:
                self._argue(self._held[: place + 1])
                self._held, self._state = self._held[place + 1 :], _State.TAIL
                return True
        self._argue(self._held)
        self._held = ""
        return False

    def _read_broken(self) -> bool:
        close = self._held.find(self._dialect.close)
        if close >= 0:
            self._argue(self._held[:close])
            self._held, self._state = self._held[close + len(self._dialect.close) :], _State.TEXT
            return True
        safe = len(self._held) - _partial(self._held, (self._dialect.close,))
        self._argue(self._held[:safe])
        self._held = self._held[safe:]
        return False

    def _read_tail(self) -> bool:
        close = self._held.find(self._dialect.close)
        if self._begin(self._dialect.more, close):
            return True
        if close < 0:
            return False
        self._leave(self._held[:close])
        self._held, self._state = self._held[close + len(self._dialect.close) :], _State.TEXT
        return True

    # ---- what is said ------------------------------------------------------------------------------------------

    def _decide(self, text: str, *, closed: bool) -> None:
        """A call whose head was not in the usual form: calls if it is JSON that says so, else content."""
        for name, arguments in (calls := whole_calls(text, self._names) or []):
            self._open(name)
            self._argue(arguments)
        if not calls:
            self._content(self._gap + self._dialect.open + text + (self._dialect.close if closed else ""))

    def _leave(self, text: str) -> None:
        if not self._dialect.tail.fullmatch(text):
            self._content(text)

    def _open(self, name: str) -> None:
        self.num_calls += 1
        index = self.num_calls - 1
        identity = hashlib.blake2b(f"{self._key}\x1f{index}".encode(), digest_size=12).hexdigest()
        self._call(CallPart(index=index, id=f"call_{identity}", name=name))

    def _argue(self, text: str) -> None:
        if text:
            self._call(CallPart(index=self.num_calls - 1, arguments=text))

    def _call(self, part: CallPart) -> None:
        if part.index == 0 or not self._one_call:
            self._said += Said(calls=(part,))

    def _content(self, text: str) -> None:
        self._said += Said(content=text)

    def _take(self) -> Said:
        said, self._said = self._said, Said()
        return said


def _partial(text: str, tags: tuple[str, ...]) -> int:
    """Characters at the end of `text` that may be the beginning of a tag."""
    longest = max(map(len, tags)) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(tag.startswith(text[-size:]) for tag in tags):
            return size
    return 0
