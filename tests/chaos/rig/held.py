"""What the service still holds once nothing runs: sequences, pages, readers, store keys; tasks and open files."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from time import monotonic

from redis.asyncio import Redis

from seqmtp_serve.ports import StepPlan
from services.accounts import PERIOD_S, Account, AccountBook
from services.coordinator.target_link import GrpcTargetGroup
from services.rpc.channel import connect
from services.rpc.wire import coordinator, coordinator_rpc, proposer, proposer_rpc
from tests.chaos.rig.workers import Workers

LEVELS = ("tasks", "open_files")
AT_ONCE = 12  # clients that hang up together
POOLED = AT_ONCE  # connections to the store that a process may keep: once, each of these wanted one at the same moment
GATEWAY_LEVELS = tuple(f"seqmtp_gateway_{name}" for name in LEVELS)
WORK = ("requests_live", "readers")
SETTLE_S = 20.0  # after the replay window; what is held longer has leaked


async def held(workers: Workers) -> dict[str, int]:
    """Counts by name, each 0 when nothing leaked. Waits until they are, or no longer than leases and windows last."""
    give_up_at = monotonic() + SETTLE_S + workers.settings.store.replay_window_s
    while any((counts := await _count(workers)).values()) and monotonic() < give_up_at:
        await asyncio.sleep(0.5)
    return counts


def allowed(levels: Mapping[str, int]) -> dict[str, int]:
    """What processes that had these may have later, if nothing was left behind."""
    return {name: level + (POOLED if name.endswith("open_files") else 0) for name, level in levels.items()}


async def process_levels(workers: Workers, at_most: Mapping[str, int] | None = None) -> dict[str, int]:
    """Tasks and open files of each process, by its own word, once no coordinator has a request or a reader.

    Waits until none is above `at_most`, but no longer than an idle service needs.
    """
    give_up_at = monotonic() + SETTLE_S
    while True:
        await asyncio.sleep(2 * PERIOD_S)  # what is written now is about now
        async with Redis.from_url(workers.store.url) as redis:
            accounts = [each for each in await AccountBook(redis).refresh() if each.is_live()]
        busy = sum(each.gauges[name] for each in accounts if each.kind == "coordinator" for name in WORK)
        levels = {f"{each.id} {name}": value for each in accounts for name, value in _levels_of(each).items()}
        above = {name for name, value in levels.items() if at_most is not None and value > at_most.get(name, value)}
        if not (busy or above) or monotonic() > give_up_at:
            return levels


def _levels_of(account: Account) -> dict[str, int]:
    if account.kind == "gateway":
        values = {name: samples[0][2] for name, _, _, samples in account.families if name in GATEWAY_LEVELS}
        return {name.removeprefix("seqmtp_gateway_"): round(value) for name, value in values.items()}
    return {name: round(account.gauges[name]) for name in LEVELS}


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
