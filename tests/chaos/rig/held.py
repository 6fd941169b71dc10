"""What the service still holds once nothing runs: sequences, pages, readers, store keys."""

from __future__ import annotations

import asyncio
from time import monotonic

from redis.asyncio import Redis

from seqmtp_serve.ports import StepPlan
from services.coordinator.target_link import GrpcTargetGroup
from services.rpc.channel import connect
from services.rpc.wire import coordinator, coordinator_rpc, proposer, proposer_rpc
from tests.chaos.rig.workers import Workers

SETTLE_S = 20.0  # after the replay window; what is held longer has leaked


async def held(workers: Workers) -> dict[str, int]:
    """Counts by name, each 0 when nothing leaked. Waits until they are, or no longer than leases and windows last."""
    give_up_at = monotonic() + SETTLE_S + workers.settings.store.replay_window_s
    while any((counts := await _count(workers)).values()) and monotonic() < give_up_at:
        await asyncio.sleep(0.5)
    return counts


async def _count(workers: Workers) -> dict[str, int]:
    counts: dict[str, int] = {}
    for worker in workers.of("target"):
        counts[f"{worker.name} pages"] = await _target_pages(worker.address)
    for worker in workers.of("proposer"):
        async with connect(worker.address) as channel:
            info = await proposer_rpc.ProposerStub(channel).Info(proposer.ProposerInfoRequest(), timeout=5)
        counts[f"{worker.name} sequences"] = info.num_sequences
        counts[f"{worker.name} MTP pages"] = info.num_held_pages
    for worker in workers.of("coordinator"):
        async with connect(worker.address) as channel:
            reply = await coordinator_rpc.CoordinatorStub(channel).Status(coordinator.StatusRequest(), timeout=5)
        counts[f"{worker.name} requests"] = reply.running + reply.waiting
        counts[f"{worker.name} readers"] = round(reply.gauges["readers"])
    async with Redis.from_url(workers.store.url) as redis:
        counts["store keys"] = len([key async for key in redis.scan_iter("seqmtp:{*")])
    return counts


async def _target_pages(address: str) -> int:
    async def only() -> list[str]:
        return [address]

    group = GrpcTargetGroup(only)
    try:
        info = await group.info()
        return info.num_pages - (await group.step(StepPlan(step_id=1))).free_pages
    finally:
        await group.close()
