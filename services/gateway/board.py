"""The last known status of the coordinators, asked again when it is older than a moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from seqmtp_serve.errors import ModelNotFound, NotReady
from services.gateway.coordinators import CoordinatorClient, CoordinatorStatus

FRESH_S = 1.0


class StatusBoard:
    """One reading serves all requests of a second; whoever needs it first asks, the others wait for that answer."""

    def __init__(self, coordinator: CoordinatorClient, served_name: str | None = None) -> None:
        self._coordinator = coordinator
        self._served_name = served_name
        self._lock = asyncio.Lock()
        self._read_at = float("-inf")
        self._statuses: Sequence[CoordinatorStatus] = ()

    async def statuses(self, max_age_s: float = FRESH_S) -> Sequence[CoordinatorStatus]:
        """Every coordinator that answered."""
        async with self._lock:
            if time.monotonic() - self._read_at > max_age_s:
                self._statuses = await self._coordinator.status()
                self._read_at = time.monotonic()
            return self._statuses

    @property
    def known(self) -> Sequence[CoordinatorStatus]:
        """The last reading, however old."""
        return self._statuses

    async def serving(self) -> CoordinatorStatus:
        """The coordinator to read limits from, a ready one if possible. Raises NotReady if none has met a target."""
        known = [status for status in await self.statuses() if status.max_model_len > 0]
        if not known:
            raise NotReady("No target has started yet: try again in a moment.", retry_after_s=2.0)
        return max(known, key=lambda status: status.ready)

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
