"""Signs of life in a stream of rows: a reader tells a coordinator that is stopped from one that has no news.

A connection to a stopped process stays open, and gRPC's own pings take two seconds to find it. Here a row of version 0,
which no record has, is sent after the first row, and then whenever there was no other for `BEAT_S`. A reader that has
seen one, and then nothing for `SILENCE_S`, goes on at another coordinator; being wrong costs it a second reading of the
rows. A request that waits for its first row has no heartbeat: there may be very many of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from seqmtp_serve.request import CommittedRow
from seqmtp_serve.tasks import end_tasks
from services.rpc.wire import common

BEAT_S = 0.2
SILENCE_S = 0.8
HEARTBEAT = common.CommittedRow()


async def with_heartbeats(
    rows: AsyncGenerator[CommittedRow, None], beat_s: float = BEAT_S
) -> AsyncGenerator[CommittedRow | None, None]:
    """The rows, and None after the first and whenever the next one takes longer than `beat_s`."""
    coming, began = asyncio.ensure_future(anext(rows, None)), False
    try:
        while True:
            await asyncio.wait({coming}, timeout=beat_s if began else None)
            if not coming.done():
                yield None
                continue
            row = coming.result()
            if row is None:
                return
            yield row
            coming = asyncio.ensure_future(anext(rows, None))
            if not began:
                began = True
                yield None
    finally:
        await end_tasks(coming)
        await rows.aclose()
