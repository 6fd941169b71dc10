"""Which coordinator one stream tries next: a policy without a connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from seqmtp_serve.errors import Draining, NotReady, ProtocolError, SeqMTPError, Unavailable
from services.gateway.directory import Directory

RETRY_S = 0.2


class Silent(Unavailable):
    """The coordinator gives no sign of life any more; it may be stopped, and come back. Never leaves this process."""


class WrongRow(Unavailable):
    """The coordinator gave a row that does not follow from those before it. Never leaves this process: `fault` does,
    when nobody gives the right one.
    """

    def __init__(self, fault: ProtocolError) -> None:
        super().__init__(str(fault))
        self.fault = fault


class Attempts:
    """Before the first row each coordinator is tried once: a caller waits for an answer, and may ask again itself. When
    there is none left, and one was only silent, each is tried once more, with patience.

    After it, the one that was read from is tried once more (only the connection may have broken), then whoever is
    listed, again and again until `failover_s` have passed since the break: the tokens so far are the caller's. So it is
    after a wrong row, which says that there are rows. `first` is where to begin, if it is listed.
    """

    def __init__(self, directory: Directory, turn: Iterator[int], failover_s: float, first: str = "") -> None:
        self._directory, self._turn, self._failover_s = directory, turn, failover_s
        self._current = first
        self._failed: set[str] = set()
        self._error: Unavailable | None = None
        self._began = False
        self._give_up_at = float("inf")
        self._has_other = False
        self._rounds_left = 1  # before the first row, for those that were silent

    @property
    def is_impatient(self) -> bool:
        """Whether there is another coordinator to go to, should the current one fall silent before the first row."""
        return self._has_other and self._rounds_left > 0

    async def next(self) -> str:
        """An address. Raises NotReady when none is left to try, what the coordinators refused with, or what was wrong
        with their rows.
        """
        if self._error is not None and self._began and self._current not in self._failed:
            await asyncio.sleep(RETRY_S)
        while True:
            listed = [address for address in await self._directory.addresses() if address not in self._failed]
            if self._current not in listed:
                self._current = listed[next(self._turn) % len(listed)] if listed else ""
            if self._current:
                self._has_other = len(listed) > 1 or bool(self._failed)
                return self._current
            if not self._began and isinstance(self._error, Silent) and self._rounds_left:
                self._rounds_left -= 1
                self._failed.clear()
                continue
            if not self._began or time.monotonic() > self._give_up_at:
                raise self._refusal()
            self._failed.clear()
            await asyncio.sleep(RETRY_S)

    def progressed(self) -> None:
        """A row came from the current address."""
        self._began, self._error, self._give_up_at = True, None, float("inf")
        self._failed.clear()

    def lost(self, error: Unavailable) -> None:
        """The current address failed. Raises the error itself if trying elsewhere cannot help.

        A plain Unavailable is a lost connection; Draining, Silent and WrongRow send elsewhere at once; any other is the
        word of a coordinator that has waited already. Once a connection was lost, another coordinator that cannot take
        the request over is only passed by.
        """
        if self._began and self._error is None and type(error) not in (Unavailable, Draining, Silent, WrongRow):
            raise error
        self._began = self._began or isinstance(error, WrongRow)
        if self._error is None:
            self._give_up_at = time.monotonic() + self._failover_s
        if not self._began or self._error is not None or type(error) is not Unavailable:
            self._failed.add(self._current)
        if self._error is None or type(self._error) in (Unavailable, Silent):
            self._error = error

    def _refusal(self) -> SeqMTPError:
        if isinstance(self._error, WrongRow):
            return self._error.fault
        if self._error is None or type(self._error) in (Unavailable, Silent):
            return NotReady("No coordinator is reachable: try again in a moment.", retry_after_s=2.0)
        return self._error
