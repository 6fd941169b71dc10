"""What readings of many requests can be like, drawn from a seed: rows in bursts, and every way to end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from random import Random

from seqmtp_serve.errors import (
    Draining,
    InternalError,
    NotReady,
    Overloaded,
    RequestNotFound,
    SeqMTPError,
    StoreBehind,
)
from seqmtp_serve.request import CommittedRow, FinishReason

ENDS: tuple[Callable[[], Exception] | None, ...] = (
    None,  # its last row has `finish`; and more often than any other end
    None,
    None,
    lambda: Draining("another one goes on"),
    lambda: NotReady("no target", retry_after_s=3.0),
    lambda: Overloaded("full", retry_after_s=7.0),
    lambda: RequestNotFound("unknown"),
    lambda: StoreBehind("another text"),
    lambda: RuntimeError("a mistake of ours"),
    StopAsyncIteration,  # it ends early, without a word
)
SLOWEST_S = 0.003


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """One reading: the rows that there are, how they end, and what its reader does."""

    request_id: str
    rows: tuple[CommittedRow, ...]
    end: Callable[[], Exception] | None
    bursts: frozenset[int]  # versions that come at once after the row before
    leaves_after: int | None  # rows, after which its reader hangs up
    pause_s: float  # that its reader makes after a row


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a reader got, and how that ended."""

    rows: tuple[CommittedRow, ...]
    end: str


def histories(rng: Random) -> list[History]:
    """Some that run side by side."""
    return [_history(rng, f"r{number}") for number in range(rng.randint(1, 12))]


def _history(rng: Random, name: str) -> History:
    end, num_rows = rng.choice(ENDS), rng.choice([0, 1, 5, 40, 200])
    num_rows = max(num_rows, end is None)
    return History(
        request_id=name,
        rows=tuple(
            _row(rng, name, version, is_last=end is None and version == num_rows) for version in range(1, num_rows + 1)
        ),
        end=end,
        bursts=frozenset(version for version in range(num_rows + 1) if rng.random() < 0.7),
        leaves_after=rng.choice([None, None, None, 0, 1, 30]),
        pause_s=rng.choice([0.0, 0.0, SLOWEST_S]),
    )


def at_once(name: str, num_rows: int) -> History:
    """A reading whose rows are all there already."""
    rows = tuple(_row(Random(name), name, version, is_last=version == num_rows) for version in range(1, num_rows + 1))
    bursts = frozenset(range(num_rows + 1))
    return History(request_id=name, rows=rows, end=None, bursts=bursts, leaves_after=None, pause_s=0.0)


def _row(rng: Random, name: str, version: int, *, is_last: bool) -> CommittedRow:
    return CommittedRow(
        request_id=name,
        version=version,
        tokens=tuple(rng.randrange(1000) for _ in range(rng.randint(1, 4))),
        drafted=3,
        accepted=1,
        origins="ac",
        finish=FinishReason.LENGTH if is_last else None,
        epoch=1,
        digest=rng.randbytes(16),
    )


class Source:
    """Gives the rows of histories, as a coordinator's reader does; `num_open` readings are under way."""

    def __init__(self, found: list[History], rng: Random) -> None:
        self._found, self._rng = {one.request_id: one for one in found}, rng
        self.num_open = 0
        self.num_given = dict.fromkeys(self._found, 0)

    async def rows(self, request_id: str, after_version: int) -> AsyncGenerator[CommittedRow, None]:
        self.num_open += 1
        history = self._found[request_id]
        try:
            for row in history.rows[after_version:]:
                if row.version not in history.bursts:
                    await asyncio.sleep(self._rng.uniform(0, SLOWEST_S))
                self.num_given[request_id] += 1
                yield row
            if history.end is not None and not isinstance(error := history.end(), StopAsyncIteration):
                raise error
        finally:
            self.num_open -= 1


async def read(history: History, rows: AsyncIterator[CommittedRow]) -> Seen:
    """What the history's reader gets."""
    seen: list[CommittedRow] = []
    try:
        if history.leaves_after == 0:
            return Seen(rows=(), end="left")
        async for row in rows:
            seen.append(row)
            await asyncio.sleep(history.pause_s)
            if row.finish is not None:
                return Seen(rows=tuple(seen), end="finish")
            if len(seen) == history.leaves_after:
                return Seen(rows=tuple(seen), end="left")
    except SeqMTPError as error:
        return Seen(rows=tuple(seen), end=f"{error.code} {getattr(error, 'retry_after_s', None)}")
    return Seen(rows=tuple(seen), end="early")


async def expected(history: History, source: Source) -> Seen:
    """What a reader must get, without anything between it and the rows."""

    async def translated() -> AsyncIterator[CommittedRow]:
        try:
            async with aclosing(source.rows(history.request_id, 0)) as rows:
                async for row in rows:
                    yield row
        except RuntimeError as error:
            raise InternalError(str(error)) from error

    async with aclosing(translated()) as rows:  # type: ignore[type-var]
        return await read(history, rows)
