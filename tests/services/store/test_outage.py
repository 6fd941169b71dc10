"""The server stops, dies, forgets its scripts, or is full: calls end in time, and the same call succeeds later."""

from __future__ import annotations

import asyncio
import os
import signal
from time import monotonic

import pytest

from seqmtp_serve.errors import Overloaded, StoreUnreachable
from seqmtp_serve.ports import CommitResult
from services.settings import StoreSettings
from services.store.client import RedisFrontierStore
from services.store.embedded import EmbeddedValkey
from tests.contract.store_rows import a_commit, a_request
from tests.patience import PATIENT


async def test_forgotten_scripts_are_loaded_again_for_the_rows_that_missed_them(store: RedisFrontierStore) -> None:
    for request_id in "abc":
        await store.acquire(a_request(request_id), "c", 5.0)
    await store.redis.script_flush()
    assert await store.commit([a_commit(request_id, 1) for request_id in "abc"]) == [CommitResult.OK] * 3


async def test_a_stopped_server_is_given_up_in_time(own_valkey: EmbeddedValkey) -> None:
    store = RedisFrontierStore(own_valkey.url, StoreSettings(socket_timeout_s=0.1, deadline_s=0.5))
    patient = RedisFrontierStore(own_valkey.url, PATIENT)
    await patient.acquire(a_request("r"), "c", 5.0)
    assert own_valkey.pid is not None
    os.kill(own_valkey.pid, signal.SIGSTOP)
    try:
        asked_at = monotonic()
        with pytest.raises(StoreUnreachable):
            await store.commit([a_commit("r", 1)])
        waited_s = monotonic() - asked_at
    finally:
        os.kill(own_valkey.pid, signal.SIGCONT)
    assert waited_s < 20.0  # the library's own patience is longer than 25 s
    assert (await patient.commit([a_commit("r", 1)]))[0] in (CommitResult.OK, CommitResult.DUP)
    snapshot = await patient.snapshot("r")
    assert snapshot is not None
    assert [row.version for row in snapshot.rows] == [1]
    for client in (store, patient):
        await client.close()


@pytest.mark.covers(88)
async def test_rows_survive_the_servers_death(own_valkey: EmbeddedValkey) -> None:
    store = RedisFrontierStore(own_valkey.url, PATIENT)
    await store.acquire(a_request("r"), "c", 5.0)
    await store.commit([a_commit("r", 1)])
    assert own_valkey.pid is not None
    os.kill(own_valkey.pid, signal.SIGKILL)
    commit = asyncio.create_task(store.commit([a_commit("r", 2)]))  # sent into the outage
    await asyncio.sleep(0.1)
    own_valkey.stop()
    own_valkey.start()
    assert await commit == [CommitResult.OK]
    snapshot = await store.snapshot("r")
    assert snapshot is not None
    assert [row.version for row in snapshot.rows] == [1, 2]
    await store.close()


async def test_a_full_server_is_overload_and_changes_nothing(own_valkey: EmbeddedValkey) -> None:
    store = RedisFrontierStore(own_valkey.url, PATIENT)
    await store.acquire(a_request("r"), "c", 5.0)
    await store.redis.config_set("maxmemory", 1)
    with pytest.raises(Overloaded):
        await store.acquire(a_request("other"), "c", 5.0)
    with pytest.raises(Overloaded):
        await store.commit([a_commit("r", 1)])
    await store.redis.config_set("maxmemory", 0)
    assert await store.commit([a_commit("r", 1)]) == [CommitResult.OK]
    assert await store.snapshot("other") is None
    await store.close()
