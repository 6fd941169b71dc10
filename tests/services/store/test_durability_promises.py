"""What each durability class promises, and what it does not: servers killed, cut off from power, and failed over.

A row that was answered is compared with what the record holds afterwards. The same faults, one class lower, lose rows:
so a test that finds none would have found them.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import pytest

from seqmtp_serve.errors import StoreUnreachable
from seqmtp_serve.ports import CommitResult
from services.free_port import free_port
from services.settings import StoreSettings
from services.store.client import RedisFrontierStore
from services.store.durability import Durability
from services.store.embedded import EmbeddedValkey
from tests.contract.store_rows import a_commit, a_request
from tests.patience import PATIENT

COMPILER = shutil.which("cc")
DONE = (CommitResult.OK, CommitResult.DUP)


async def answered(store: RedisFrontierStore, first: int, last: int) -> int:
    """Commit rows one after the other; the last version that was answered."""
    for version in range(first, last + 1):
        try:
            (answer,) = await store.commit([a_commit("r", version)])
        except StoreUnreachable:
            return version - 1
        assert answer in DONE
    return last


async def recorded(url: str) -> int:
    """The version of the record on that server, whose rows must be whole."""
    store = RedisFrontierStore(url, PATIENT)
    try:
        snapshot = await store.snapshot("r")
        if snapshot is None:
            return 0
        assert [row.version for row in snapshot.rows] == list(range(1, snapshot.version + 1))
        return snapshot.version
    finally:
        await store.close()


@pytest.mark.covers(88)
async def test_c1_a_killed_server_has_every_row_that_was_answered(tmp_path: Path) -> None:
    settings = StoreSettings(durability="C1", deadline_s=1.5)
    with EmbeddedValkey(tmp_path / "c1") as server:
        store = RedisFrontierStore(server.url, settings)
        await store.acquire(a_request("r"), "c", 60.0)
        last = 0
        for _ in range(4):
            writing = asyncio.create_task(answered(store, last + 1, 10**6))
            give_up_at = monotonic() + 20
            while await recorded(server.url) < last + 40 and monotonic() < give_up_at:
                await asyncio.sleep(0.005)
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            last = await writing
            server.stop()
            server.start()
            found = await recorded(server.url)
            assert last <= found <= last + 1  # the row whose answer was lost may be in
            last = found
        assert last >= 40
        await store.close()


@contextmanager
def watched(folder: Path, durability: Durability) -> Iterator[EmbeddedValkey]:
    """A server whose syncs are noted beside its files."""
    library = folder / "power_cut.so"
    source = Path(__file__).with_name("power_cut.c")
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    os.environ["LD_PRELOAD"] = str(library)
    try:
        server = EmbeddedValkey(folder / durability, durability=durability)
        server.start()
    finally:
        del os.environ["LD_PRELOAD"]
    try:
        yield server
    finally:
        server.stop()


def cut_power(server: EmbeddedValkey) -> None:
    """Kill the server, and leave of its append-only files only what was synced."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    for file in (server.directory / "appendonlydir").glob("*.aof"):
        mark = file.with_name(f"{file.name}.synced")
        os.truncate(file, min(file.stat().st_size, int(mark.read_text()) if mark.exists() else 0))


@pytest.mark.covers(88)
@pytest.mark.skipif(COMPILER is None, reason="no C compiler: a power cut cannot be acted out here")
@pytest.mark.parametrize("durability", ["C2", "C1"])
async def test_c2_a_host_without_power_has_every_row_that_was_answered(tmp_path: Path, durability: Durability) -> None:
    with watched(tmp_path, durability) as server:
        store = RedisFrontierStore(server.url, PATIENT.model_copy(update={"durability": durability}))
        await store.acquire(a_request("r"), "c", 60.0)
        last = await answered(store, 1, 50)
        await store.close()
        cut_power(server)
        server.start()
        assert last == 50
        assert await recorded(server.url) == (50 if durability == "C2" else 0)  # C1 promises nothing here


@pytest.mark.covers(88)
@pytest.mark.parametrize("durability", ["C3", "C1"])
async def test_c3_the_replica_that_is_promoted_has_every_row_that_was_answered(
    tmp_path: Path, durability: Durability
) -> None:
    port = free_port()
    settings = StoreSettings(durability=durability, wait_ms=100, deadline_s=3.0, socket_timeout_s=0.3)
    servers = EmbeddedValkey(tmp_path / "primary", port=port), EmbeddedValkey(tmp_path / "replica", replica_of=port)
    with servers[0] as primary, servers[1] as replica:
        patient = RedisFrontierStore(primary.url, PATIENT.model_copy(update={"durability": "C3"}))
        await patient.acquire(a_request("r"), "c", 600.0)  # the replica is in step from here on
        steady = RedisFrontierStore(primary.url, PATIENT.model_copy(update={"durability": durability}))
        assert await answered(steady, 1, 30) == 30
        store = RedisFrontierStore(primary.url, settings)
        assert replica.pid is not None
        os.kill(replica.pid, signal.SIGSTOP)  # a partition: nothing reaches it any more
        try:
            late = await answered(store, 31, 60)
            assert primary.pid is not None
            os.kill(primary.pid, signal.SIGKILL)
        finally:
            os.kill(replica.pid, signal.SIGCONT)
        promoted = RedisFrontierStore(replica.url, PATIENT)
        await promoted.redis.replicaof("NO", "ONE")
        found = await recorded(replica.url)
        if durability == "C3":
            assert late == 30  # row 31 was written, but never answered: nobody has seen it
            assert found >= late
        else:
            assert late == 60
            assert found <= 60  # C1 promises nothing here
        for client in (patient, steady, store, promoted):
            await client.close()
