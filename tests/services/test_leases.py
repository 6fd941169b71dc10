"""Leases of requests that commit nothing are renewed, whatever the store does in between."""

import asyncio

from seqmtp_serve.errors import StoreUnreachable
from seqmtp_serve.ports import CommitResult
from seqmtp_serve.request import Ref
from services.coordinator.leases import keep_leases


class FlakyStore:
    """Unreachable at the first call."""

    def __init__(self):
        self.renewed: list[tuple[str, int]] = []
        self.num_calls = 0

    async def renew(self, request_id: str, epoch: int) -> CommitResult:
        self.num_calls += 1
        if self.num_calls == 1:
            raise StoreUnreachable("away")
        self.renewed.append((request_id, epoch))
        return CommitResult.FENCED if request_id == "stolen" else CommitResult.OK


async def test_every_owned_request_is_renewed_turn_after_turn():
    store = FlakyStore()
    owned = [Ref(request_id=name, epoch=2, version=0, digest=bytes(16)) for name in ("stolen", "queued")]
    keeping = asyncio.create_task(keep_leases(lambda: owned, store, lease_s=0.03))
    async with asyncio.timeout(20):
        while len(store.renewed) < 4:
            await asyncio.sleep(0.01)
    keeping.cancel()
    assert store.renewed[:4] == [("stolen", 2), ("queued", 2)] * 2
