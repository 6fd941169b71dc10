"""Metrics out, over OTLP: one of the gateways sends what /metrics shows of the whole service, again and again.

Which one, is a lease in the store: the others wait to take over. Since what is sent is everybody's, and is under no
gateway's name, a collector sees the same series whoever sends them, and their sums never go back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from seqmtp_serve.tasks import end_tasks
from services import otlp
from services.accounts import AccountBook
from services.gateway.scrape import Scrape

SERVICE = "seqmtp"


@contextlib.asynccontextmanager
async def exporting_metrics(scrape: Scrape, gateway_id: str, accounts: AccountBook | None) -> AsyncIterator[None]:
    """Export while the block runs, and once more at its end. Does nothing unless `OTEL_*` variables ask for it."""
    if not otlp.is_wanted("metrics"):
        yield
        return
    from services.otlp_metrics import metrics_data  # the SDK

    exporter, resource, interval_s = otlp.exporter_of("metrics"), otlp.resource_of(SERVICE, None), otlp.interval_s()

    async def export() -> None:
        if accounts is None or await accounts.speaks(gateway_id, for_s=2.5 * interval_s):
            data = metrics_data(await scrape.families(), resource)
            await asyncio.to_thread(exporter.export, data)

    async def keep() -> None:
        while True:
            await asyncio.sleep(interval_s)
            await export()

    keeping = asyncio.create_task(keep())
    try:
        yield
    finally:
        await end_tasks(keeping)
        await export()
        if accounts is not None:
            await accounts.falls_silent(gateway_id)
        await asyncio.to_thread(exporter.shutdown)
