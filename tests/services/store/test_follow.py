"""Readers in another process see each committed row once, in order, to the end."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from seqmtp_serve.errors import RequestNotFound, StoreBehind, StoreUnreachable
from seqmtp_serve.request import CommittedRow, FinishReason
from services.settings import StoreSettings
from services.store import follow
from services.store.client import RedisFrontierStore
from services.store.embedded import EmbeddedValkey
from services.store.records import keys
from tests.contract.store_rows import a_commit, a_request
from tests.patience import PATIENT

LAST = 8


async def read(store: RedisFrontierStore, request_id: str, after_version: int = 0) -> list[CommittedRow]:
    return [row async for row in store.follow(request_id, after_version)]


async def write(store: RedisFrontierStore, request_id: str, start: int = 1, pause_s: float = 0.01) -> None:
    for version in range(start, LAST + 1):
        await asyncio.sleep(pause_s)
        await store.commit([a_commit(request_id, version, finish=FinishReason.STOP if version == LAST else None)])


async def test_followers_of_several_requests_share_a_reader(store: RedisFrontierStore) -> None:
    for request_id in "ab":
        await store.acquire(a_request(request_id), "c", 5.0)
        await store.commit([a_commit(request_id, 1)])
    followers = [asyncio.create_task(read(store, "a"))]
    await asyncio.sleep(0.05)
    followers += [asyncio.create_task(read(store, request_id, after)) for request_id, after in (("b", 0), ("a", 1))]
    await asyncio.gather(write(store, "a", 2), write(store, "b", 2))
    from_start, other, from_one = await asyncio.gather(*followers)
    assert [row.version for row in from_start] == [row.version for row in other] == list(range(1, LAST + 1))
    assert from_one == from_start[1:]
    assert from_start[-1].finish == FinishReason.STOP


async def test_a_finished_request_is_replayed(store: RedisFrontierStore) -> None:
    await store.acquire(a_request("r"), "c", 5.0)
    await write(store, "r", pause_s=0)
    assert [row.version for row in await read(store, "r", 5)] == [6, 7, 8]
    assert await read(store, "r", LAST) == []


@pytest.mark.parametrize("late", [False, True])
async def test_a_cancelled_request_ends_with_a_row_without_tokens(store: RedisFrontierStore, late: bool) -> None:
    await store.acquire(a_request("r"), "c", 5.0)
    await store.commit([a_commit("r", 1)])
    if late:
        await store.cancel("r")
    follower = asyncio.create_task(read(store, "r"))
    await asyncio.sleep(0.05)
    await store.cancel("r")
    rows = await asyncio.wait_for(follower, 30)
    assert [(row.version, row.finish) for row in rows] == [(1, None), (2, FinishReason.CANCELLED)]
    assert rows[-1].tokens == ()


async def test_unknown_and_regressed_records_are_named(store: RedisFrontierStore) -> None:
    with pytest.raises(RequestNotFound):
        await read(store, "unknown")
    await store.acquire(a_request("r"), "c", 5.0)
    with pytest.raises(StoreBehind):
        await read(store, "r", 3)


async def test_a_record_that_vanishes_ends_its_followers(
    store: RedisFrontierStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "QUIET_S", 0.1)
    await store.acquire(a_request("r"), "c", 5.0)
    follower = asyncio.create_task(read(store, "r"))
    await asyncio.sleep(0.05)
    await store.redis.delete(*keys("r"))
    with pytest.raises(RequestNotFound):
        await asyncio.wait_for(follower, 30)


async def test_a_follower_outlives_a_restart_of_the_server(own_valkey: EmbeddedValkey) -> None:
    store = RedisFrontierStore(own_valkey.url, PATIENT)
    await store.acquire(a_request("r"), "c", 5.0)
    follower = asyncio.create_task(read(store, "r"))
    await store.commit([a_commit("r", 1)])
    await asyncio.sleep(0.05)
    own_valkey.stop()
    own_valkey.start()
    await write(store, "r", 2)
    assert [row.version for row in await asyncio.wait_for(follower, 30)] == list(range(1, LAST + 1))
    await store.close()


async def test_followers_are_told_when_the_server_stays_away(own_valkey: EmbeddedValkey) -> None:
    patient = RedisFrontierStore(own_valkey.url, PATIENT)
    await patient.acquire(a_request("r"), "c", 5.0)
    store = RedisFrontierStore(own_valkey.url, StoreSettings(deadline_s=0.3))
    follower = asyncio.create_task(read(store, "r"))
    await asyncio.sleep(0.05)
    assert own_valkey.pid is not None
    os.kill(own_valkey.pid, signal.SIGKILL)
    with pytest.raises(StoreUnreachable):
        await asyncio.wait_for(follower, 30)
    for client in (patient, store):
        await client.close()
