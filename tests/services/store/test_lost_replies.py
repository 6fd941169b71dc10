"""A reply that is lost on the way is not a row that is lost, nor one that is written twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from seqmtp_serve.ports import CommitResult
from seqmtp_serve.request import FinishReason
from services.store.client import RedisFrontierStore
from services.store.embedded import EmbeddedValkey
from tests.contract.store_rows import a_commit, a_request
from tests.patience import PATIENT
from tests.services.store.reply_dropper import ReplyDropper

ROWS = 30


@pytest.mark.covers(85, 88)
async def test_rows_are_committed_once_when_replies_are_lost(session_valkey: EmbeddedValkey, tmp_path: Path) -> None:
    proxy = ReplyDropper(session_valkey.socket)
    async with proxy.listen(tmp_path / "p.sock") as url:
        store = RedisFrontierStore(url, PATIENT)
        await store.redis.flushall()
        await store.acquire(a_request("r"), "c", 5.0)
        results = []
        for version in range(1, ROWS + 1):
            proxy.losing = version % 3 == 0
            results += await store.commit([a_commit("r", version)])
        snapshot = await store.snapshot("r")
        await store.close()
    assert proxy.lost == ROWS // 3
    assert results.count(CommitResult.DUP) == ROWS // 3
    assert results.count(CommitResult.OK) == ROWS - ROWS // 3
    assert snapshot is not None
    assert [row.version for row in snapshot.rows] == list(range(1, ROWS + 1))


async def test_a_naive_store_fails_the_same_fault(session_valkey: EmbeddedValkey, tmp_path: Path) -> None:
    """The control: appending without a version, retried the same way, writes rows twice."""
    proxy = ReplyDropper(session_valkey.socket)
    async with proxy.listen(tmp_path / "p.sock") as url:
        store = RedisFrontierStore(url, PATIENT)
        await store.redis.flushall()
        for version in range(1, ROWS + 1):
            proxy.losing = version % 3 == 0
            try:
                await store.redis.rpush("naive", version)
            except RedisConnectionError:
                await store.redis.rpush("naive", version)
        assert await store.redis.llen("naive") == ROWS + ROWS // 3
        await store.close()


async def test_acquire_sent_again_raises_the_epoch_once(session_valkey: EmbeddedValkey, tmp_path: Path) -> None:
    proxy = ReplyDropper(session_valkey.socket)
    async with proxy.listen(tmp_path / "p.sock") as url:
        store = RedisFrontierStore(url, PATIENT)
        await store.redis.flushall()
        await store.acquire(a_request("r"), "c", 5.0)
        proxy.losing = 1
        assert (await store.acquire(a_request("r"), "c2", 5.0)).epoch == 2
        await store.close()
    assert proxy.lost == 1


@pytest.mark.covers(85, 88)
async def test_an_end_is_written_once_when_its_reply_is_lost(session_valkey: EmbeddedValkey, tmp_path: Path) -> None:
    proxy = ReplyDropper(session_valkey.socket)
    async with proxy.listen(tmp_path / "p.sock") as url:
        store = RedisFrontierStore(url, PATIENT)
        await store.redis.flushall()
        for request_id in ("cancelled", "finished"):
            await store.acquire(a_request(request_id), "c", 5.0)
            await store.commit([a_commit(request_id, 1)])
        proxy.losing = 1
        assert await store.cancel("cancelled") == CommitResult.DUP
        proxy.losing = 1
        assert await store.finish("finished", 1, FinishReason.ERROR) == CommitResult.DUP
        assert proxy.lost == 2
        for request_id, finish in (("cancelled", FinishReason.CANCELLED), ("finished", FinishReason.ERROR)):
            snapshot = await store.snapshot(request_id)
            assert snapshot is not None
            assert (snapshot.finish, snapshot.version) == (finish, 1)
            assert await store.commit([a_commit(request_id, 2)]) == [CommitResult.GONE]
        await store.close()
