"""Leases of requests that commit nothing are renewed, whatever the store does in between; a stopping owner lets go."""

import asyncio
from collections.abc import Sequence

from seqmtp_serve.errors import StoreUnreachable
from seqmtp_serve.ports import CommitResult
from seqmtp_serve.request import Ref
from services.coordinator.leases import hand_back, keep_leases

OWNED = [Ref(request_id=name, epoch=2, version=0, digest=bytes(16)) for name in ("stolen", "queued")]


class FlakyStore:
    """Unreachable at the first call."""

    def __init__(self):
        self.renewed: list[tuple[str, int, float]] = []
        self.num_calls = 0

    async def renew(self, owned: Sequence[Ref], lease_s: float) -> Sequence[CommitResult]:
        self.num_calls += 1
        if self.num_calls == 1:
            raise StoreUnreachable("away")
        self.renewed += [(ref.request_id, ref.epoch, lease_s) for ref in owned]
        return [CommitResult.FENCED if ref.request_id == "stolen" else CommitResult.OK for ref in owned]


async def test_every_owned_request_is_renewed_turn_after_turn_and_the_answers_are_told():
    store, told = FlakyStore(), []
    keeping = asyncio.create_task(
        keep_leases(lambda: OWNED, store, 0.03, lambda refs, answers: told.append((refs, answers)))
    )
    async with asyncio.timeout(20):
        while len(told) < 2:
            await asyncio.sleep(0.01)
    keeping.cancel()
    assert store.renewed[:4] == [("stolen", 2, 0.03), ("queued", 2, 0.03)] * 2
    assert told[0] == (OWNED, [CommitResult.FENCED, CommitResult.OK])


async def test_a_stopping_coordinator_lets_its_leases_lapse_and_a_store_that_is_away_does_not_stop_it():
    store = FlakyStore()
    await hand_back(OWNED, store)
    assert store.renewed == []
    await hand_back(OWNED, store)
    assert store.renewed == [("stolen", 2, 0.0), ("queued", 2, 0.0)]
