"""A class that the server cannot keep is refused; C3 returns only once a replica holds the row."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from seqmtp_serve.errors import StoreError, StoreUnreachable
from seqmtp_serve.ports import CommitResult
from services.free_port import free_port
from services.settings import StoreSettings
from services.store.client import RedisFrontierStore
from services.store.embedded import EmbeddedValkey
from tests.contract.store_rows import a_commit, a_request
from tests.patience import PATIENCE_S, PATIENT


async def test_c1_needs_the_append_only_file(own_valkey: EmbeddedValkey) -> None:
    store = RedisFrontierStore(own_valkey.url, PATIENT)
    await store.redis.config_set("appendonly", "no")
    with pytest.raises(StoreError, match="appendonly"):
        await store.acquire(a_request("r"), "c", 5.0)
    await store.close()


async def test_c2_needs_appendfsync_always(tmp_path: Path) -> None:
    for durability, fits in (("C1", False), ("C2", True)):
        with EmbeddedValkey(tmp_path / durability, durability=durability) as server:  # type: ignore[arg-type]
            store = RedisFrontierStore(server.url, PATIENT.model_copy(update={"durability": "C2"}))
            if fits:
                assert (await store.acquire(a_request("r"), "c", 5.0)).epoch == 1
            else:
                with pytest.raises(StoreError, match="appendfsync always"):
                    await store.acquire(a_request("r"), "c", 5.0)
            await store.close()


@pytest.mark.covers(88)
async def test_c3_waits_for_a_replica(tmp_path: Path) -> None:
    port = free_port()
    settings = StoreSettings(durability="C3", wait_ms=50, deadline_s=1.5, socket_timeout_s=PATIENCE_S)
    with EmbeddedValkey(tmp_path / "primary", port=port) as primary:
        store = RedisFrontierStore(primary.url, settings)
        for write in (store.acquire(a_request("r"), "c", 5.0), store.commit([a_commit("r", 1)]), store.cancel("s")):
            with pytest.raises(StoreUnreachable, match="0 of 1 replicas"):
                await write
        with EmbeddedValkey(tmp_path / "replica", replica_of=port) as replica:
            patient = RedisFrontierStore(primary.url, PATIENT.model_copy(update={"durability": "C3", "wait_ms": 50}))
            results = [*await patient.commit([a_commit("r", 1)]), *await patient.commit([a_commit("r", 2)])]
            assert results[0] == CommitResult.DUP  # it was written, but never acknowledged
            copy = RedisFrontierStore(replica.url, PATIENT)
            state = await copy.redis.hget("seqmtp:{r}:state", "version")
            assert state == b"2"
            for open_store in (copy, patient, store):
                await open_store.close()


@pytest.mark.covers(88)
async def test_c3_waits_for_a_row_that_another_connection_wrote(tmp_path: Path) -> None:
    """Who repeats a commit finds the row there, writes nothing, and must not be told that the replica holds it."""
    port = free_port()
    settings = StoreSettings(durability="C3", wait_ms=50, deadline_s=0.5, socket_timeout_s=PATIENCE_S)
    servers = EmbeddedValkey(tmp_path / "primary", port=port), EmbeddedValkey(tmp_path / "replica", replica_of=port)
    with servers[0] as primary, servers[1] as replica:
        patient = RedisFrontierStore(primary.url, PATIENT.model_copy(update={"durability": "C3"}))
        await patient.acquire(a_request("r"), "c", 600.0)  # the replica is in step from here on
        assert replica.pid is not None
        os.kill(replica.pid, signal.SIGSTOP)
        try:
            for _ in range(2):
                store = RedisFrontierStore(primary.url, settings)
                with pytest.raises(StoreUnreachable, match="0 of 1 replicas"):
                    await store.commit([a_commit("r", 1)])
                await store.close()
        finally:
            os.kill(replica.pid, signal.SIGCONT)
        assert await patient.commit([a_commit("r", 1)]) == [CommitResult.DUP]
        copy = RedisFrontierStore(replica.url, PATIENT)
        assert await copy.redis.hget("seqmtp:{r}:state", "version") == b"1"
        for open_store in (copy, patient):
            await open_store.close()
