"""Where coordinators are: a fixed list, or what the registry says."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from seqmtp_serve.errors import StoreUnreachable


class Directory(Protocol):
    """The addresses (`host:port`) to try, best known state. Never raises."""

    async def addresses(self) -> Sequence[str]: ...


class FixedDirectory:
    """Addresses given by hand."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = tuple(addresses)

    async def addresses(self) -> Sequence[str]:
        """Those addresses."""
        return self._addresses


class ListedDirectory:
    """Asks `listing` at most once in `fresh_s`. While the registry is away the last answer stands."""

    def __init__(self, listing: Callable[[], Awaitable[Sequence[str]]], fresh_s: float = 0.5) -> None:
        self._listing, self._fresh_s = listing, fresh_s
        self._read_at = float("-inf")
        self._known: tuple[str, ...] = ()

    async def addresses(self) -> Sequence[str]:
        """The latest answer."""
        if time.monotonic() - self._read_at > self._fresh_s:
            self._read_at = time.monotonic()
            with contextlib.suppress(StoreUnreachable):
                self._known = tuple(await self._listing())
        return self._known
