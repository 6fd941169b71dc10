"""Renewal of the leases of requests, and their return when a coordinator stops.

A lease says that somebody works on the record, and keeps the record from expiring; it protects nothing (the epoch
does). Every commit renews it too: this is for requests that commit nothing for a while, queued or in a long prefill. An
answer FENCED or GONE means that the request is not ours any more, and is told to the driver at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from seqmtp_serve.errors import SeqMTPError
from seqmtp_serve.ports import CommitResult
from seqmtp_serve.request import Ref

RENEWALS_PER_LEASE = 3
HAND_BACK_S = 2.0  # a coordinator that ends waits so long for a store that is away

log = logging.getLogger(__name__)


class RenewingStore(Protocol):
    """The one call of a store that this needs."""

    async def renew(self, owned: Sequence[Ref], lease_s: float) -> Sequence[CommitResult]: ...


async def keep_leases(
    owned: Callable[[], Sequence[Ref]],
    store: RenewingStore,
    lease_s: float,
    renewed: Callable[[Sequence[Ref], Sequence[CommitResult]], None],
) -> None:
    """Renew the leases of all requests owned at each turn, until cancelled. A store that is away gets its next turn.

    `renewed` is told what was asked and answered.
    """
    while True:
        await asyncio.sleep(lease_s / RENEWALS_PER_LEASE)
        refs = owned()
        try:
            renewed(refs, await store.renew(refs, lease_s))
        except SeqMTPError as error:
            log.warning("leases could not be renewed: %s", error)


async def hand_back(owned: Sequence[Ref], store: RenewingStore, within_s: float = HAND_BACK_S) -> None:
    """Let the leases lapse now: another coordinator need not wait to go on with these requests."""
    try:
        async with asyncio.timeout(within_s):
            await store.renew(owned, 0.0)
    except (SeqMTPError, TimeoutError) as error:
        log.warning("%d requests wait for their leases to lapse: %s", len(owned), error)
