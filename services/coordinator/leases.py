"""Renewal of the leases of requests that commit nothing for a while: those that are queued, or in a long prefill.

A lease says that somebody works on the record, and keeps the record from expiring; it protects nothing (the epoch
does). So an answer FENCED or GONE is left to the next commit, which ends the request with the right error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from seqmtp_serve.errors import StoreError
from seqmtp_serve.ports import CommitResult
from seqmtp_serve.request import Ref

RENEWALS_PER_LEASE = 3

log = logging.getLogger(__name__)


class RenewingStore(Protocol):
    """The one call of a store that this needs."""

    async def renew(self, request_id: str, epoch: int) -> CommitResult: ...


async def keep_leases(owned: Callable[[], Sequence[Ref]], store: RenewingStore, lease_s: float) -> None:
    """Renew the leases of all requests owned at each turn, until cancelled. A store that is away gets its next turn."""
    while True:
        await asyncio.sleep(lease_s / RENEWALS_PER_LEASE)
        try:
            for ref in owned():
                await store.renew(ref.request_id, ref.epoch)
        except StoreError as error:
            log.warning("leases could not be renewed: %s", error)
