"""How long a record lives, how it ends without a row, and who owns it meanwhile."""

from __future__ import annotations

import asyncio

from seqmtp_serve.ports import CommitResult
from seqmtp_serve.request import FinishReason, Ref
from services.store.client import RedisFrontierStore
from services.store.embedded import EmbeddedValkey
from services.store.records import keys
from tests.contract.store_rows import a_commit, a_request
from tests.patience import PATIENT

WINDOW_MS = 600_000


def ref(request_id: str, epoch: int) -> Ref:
    return Ref(request_id=request_id, epoch=epoch, version=0, digest=bytes(16))


async def ttl_ms(store: RedisFrontierStore) -> tuple[int, int]:
    state, rows = keys("r")
    return await store.redis.pttl(state), await store.redis.pttl(rows)


async def test_a_live_record_outlives_its_lease_by_the_window(store: RedisFrontierStore) -> None:
    await store.acquire(a_request("r"), "c", 50.0)
    await store.commit([a_commit("r", 1)])
    for left in await ttl_ms(store):
        assert WINDOW_MS < left <= WINDOW_MS + 50_000


async def test_a_finished_record_lives_for_the_window(store: RedisFrontierStore) -> None:
    await store.acquire(a_request("r"), "c", 50.0)
    await store.commit([a_commit("r", 1, finish=FinishReason.STOP)])
    for left in await ttl_ms(store):
        assert WINDOW_MS - 50_000 < left <= WINDOW_MS


async def test_renewing_moves_the_lease_of_the_owner_only(store: RedisFrontierStore) -> None:
    first = await store.acquire(a_request("r"), "c", 50.0)
    state, _ = keys("r")
    await store.redis.hset(state, "lease", 0)
    assert await store.renew([ref("r", 2), ref("unknown", 1)], 50.0) == [CommitResult.FENCED, CommitResult.GONE]
    assert await store.redis.hget(state, "lease") == b"0"
    assert await store.renew([ref("r", 1)], 70.0) == [CommitResult.OK]
    renewed = await store.snapshot("r")
    assert renewed is not None
    assert renewed.lease_left_s > first.lease_left_s
    assert await store.renew([], 70.0) == []


async def test_a_lease_that_is_handed_back_has_lapsed(store: RedisFrontierStore) -> None:
    await store.acquire(a_request("r"), "c", 50.0)
    assert await store.renew([ref("r", 1)], 0.0) == [CommitResult.OK]
    handed_back = await store.snapshot("r")
    assert handed_back is not None
    assert handed_back.lease_left_s <= 0
    assert await store.commit([a_commit("r", 1)]) == [CommitResult.OK]  # it protects nothing: the epoch does


async def test_what_another_process_reads_is_not_cancelled_as_unread(store: RedisFrontierStore) -> None:
    await store.acquire(a_request("r"), "c", 50.0)
    assert await store.attend("r", 50.0) == CommitResult.OK
    assert await store.attend("unknown", 50.0) == CommitResult.GONE
    assert await store.cancel("r", abandoned_at=1) == CommitResult.CONFLICT
    await store.redis.hset(keys("r")[0], "reader", 1)  # its word has lapsed
    assert await store.cancel("r", abandoned_at=1) == CommitResult.OK
    assert await store.cancel("r", abandoned_at=1) == CommitResult.DUP
    assert await store.attend("r", 50.0) == CommitResult.GONE


async def test_a_row_takes_few_bytes(store: RedisFrontierStore) -> None:
    await store.acquire(a_request("r"), "c", 50.0)
    await store.commit([a_commit("r", version) for version in range(1, 401)])
    assert await store.redis.memory_usage(keys("r")[1]) < 400 * 60


async def test_finish_ends_a_record_without_a_row(store: RedisFrontierStore) -> None:
    await store.acquire(a_request("r"), "c", 50.0)
    await store.commit([a_commit("r", 1)])
    assert await store.finish("r", 2, FinishReason.ERROR) == CommitResult.FENCED
    assert await store.finish("r", 1, FinishReason.ERROR) == CommitResult.OK
    assert await store.finish("r", 1, FinishReason.ERROR) == CommitResult.DUP
    assert await store.finish("r", 1, FinishReason.LENGTH) == CommitResult.GONE
    assert await store.finish("unknown", 1, FinishReason.ERROR) == CommitResult.GONE
    assert await store.renew([ref("r", 1)], 5.0) == [CommitResult.GONE]
    snapshot = await store.snapshot("r")
    assert snapshot is not None
    assert (snapshot.finish, len(snapshot.rows)) == (FinishReason.ERROR, 1)


async def test_every_key_of_a_request_lies_in_one_slot(store: RedisFrontierStore) -> None:
    slots = {await store.redis.execute_command("CLUSTER", "KEYSLOT", key) for key in keys("request-1")}
    assert len(slots) == 1


async def test_the_store_does_not_grow_with_the_number_of_requests(session_valkey: EmbeddedValkey) -> None:
    store = RedisFrontierStore(session_valkey.url, PATIENT.model_copy(update={"replay_window_s": 0.2}))
    await store.redis.flushall()
    used = []
    for batch in range(4):
        for number in range(250):
            name = f"{batch}-{number}"
            await store.acquire(a_request(name), "c", 60.0)
            last = FinishReason.STOP
            await store.commit([*(a_commit(name, version) for version in (1, 2)), a_commit(name, 3, finish=last)])
        async with asyncio.timeout(30):
            while await store.redis.dbsize():
                await asyncio.sleep(0.02)
        used.append((await store.redis.info("memory"))["used_memory_dataset"])
    assert max(used[1:]) - min(used[1:]) < 100_000
    await store.close()
