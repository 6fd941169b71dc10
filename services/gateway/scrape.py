"""One scrape of /metrics: the board and the accounts read, then every collector asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from seqmtp_serve.tasks import end_tasks
from services.accounts import AccountBook
from services.gateway.board import StatusBoard
from services.gateway.coordinator_metrics import CoordinatorCollector
from services.gateway.gateway_account import GatewayCollector

FRESH_S = 0.2


class Scrape:
    """Puts a gateway's own metrics and everybody else's into one text, and keeps this gateway's account."""

    def __init__(
        self, board: StatusBoard, own: CollectorRegistry, gateway_id: str, accounts: AccountBook | None
    ) -> None:
        self._board, self._accounts = board, accounts
        self._coordinators = CoordinatorCollector(board)
        self._gateways = GatewayCollector(own, gateway_id)
        self._all = CollectorRegistry()
        self._all.register(self._coordinators)
        self._all.register(self._gateways)

    async def text(self) -> bytes:
        """The Prometheus text, as of a moment ago; accounts are about a second old."""
        await self._refresh()
        return generate_latest(self._all)

    async def families(self) -> list[Metric]:
        """What the text says."""
        await self._refresh()
        return list(self._all.collect())

    async def _refresh(self) -> None:
        await self._board.statuses(max_age_s=FRESH_S)
        if self._accounts is not None:
            known = await self._accounts.refresh()
            self._coordinators.accounts = self._gateways.accounts = known

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Keep this gateway's account while the block runs."""
        if self._accounts is None:
            yield
            return
        keeping = asyncio.create_task(self._accounts.keep(self._gateways.account))
        try:
            yield
        finally:
            await end_tasks(keeping)
