"""The last known status of the coordinators, asked again when it is older than a moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from seqmtp_serve.errors import ModelNotFound, NotReady
from seqmtp_serve.tasks import end_tasks
from services.gateway.coordinators import CoordinatorClient, CoordinatorStatus

FRESH_S = 1.0
STALE_S = 15.0


class StatusBoard:
    """One reading at a time serves everybody. Generation does not wait for it while the last one is not too old.

    Limits and names hardly ever change; a coordinator that hangs must not hold up requests that others can take.
    """

    def __init__(self, coordinator: CoordinatorClient, served_name: str | None = None) -> None:
        self._coordinator = coordinator
        self._served_name = served_name
        self._read_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        self.known: Sequence[CoordinatorStatus] = ()  # the last reading, however old

    async def statuses(self, max_age_s: float = FRESH_S) -> Sequence[CoordinatorStatus]:
        """Every coordinator that answered, as of at most `max_age_s` ago."""
        if time.monotonic() - self._read_at > max_age_s:
            await asyncio.shield(self._read())
        return self.known

    async def serving(self) -> CoordinatorStatus:
        """The coordinator to read limits from, a ready one if possible. Raises NotReady if none has met a target."""
        age_s = time.monotonic() - self._read_at
        if age_s > STALE_S or not self.known:
            await self.statuses(0.0)
        elif age_s > FRESH_S:
            self._read()
        usable = [status for status in self.known if status.max_model_len > 0]
        if not usable:
            raise NotReady("No target has started yet: try again in a moment.", retry_after_s=2.0)
        return max(usable, key=lambda status: status.ready)

    async def check_model(self, asked: str | None) -> CoordinatorStatus:
        """The serving coordinator, if it serves that name (None: any). Raises ModelNotFound, NotReady."""
        status = await self.serving()
        name = self.name_of(status)
        if asked is not None and asked != name:
            raise ModelNotFound(f"The model '{asked[:256]}' does not exist here: '{name}' does.", param="model")
        return status

    def name_of(self, status: CoordinatorStatus) -> str:
        """The model's name in the API."""
        return self._served_name or status.model

    async def close(self) -> None:
        """Stop reading."""
        if self._reading is not None:
            await end_tasks(self._reading)

    def _read(self) -> asyncio.Task[None]:
        """The reading that runs, started if there is none."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._ask())
        return self._reading

    async def _ask(self) -> None:
        self.known = await self._coordinator.status()
        self._read_at = time.monotonic()
