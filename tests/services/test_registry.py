"""The registry: leased entries, stale ones removed, changes seen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from seqmtp_serve.errors import StoreUnreachable
from services.registry import Peer, Registry
from services.store.connection import connect
from services.store.embedded import EmbeddedValkey
from tests.patience import PATIENCE_S


@pytest.fixture
async def registry(tmp_path: Path) -> AsyncIterator[Registry]:
    with EmbeddedValkey(tmp_path) as server:
        redis = connect(server.url, socket_timeout_s=PATIENCE_S)
        yield Registry(redis)
        await redis.aclose()


async def test_entries_are_listed_by_kind(registry: Registry) -> None:
    assert await registry.list("target") == ()
    await registry.register("target", "t2", "127.0.0.1:2")
    await registry.register("target", "t1", "127.0.0.1:1", {"fingerprint": "abc"})
    await registry.register("proposer", "p", "127.0.0.1:3")
    assert await registry.list("target") == (
        Peer(kind="target", id="t1", address="127.0.0.1:1", meta={"fingerprint": "abc"}),
        Peer(kind="target", id="t2", address="127.0.0.1:2"),
    )
    await registry.remove("target", "t2")
    assert [peer.id for peer in await registry.list("target")] == ["t1"]


async def test_a_silent_worker_is_gone_and_a_slow_one_comes_back(registry: Registry) -> None:
    await registry.register("target", "t", "127.0.0.1:1", ttl_s=0.05)
    await asyncio.sleep(0.1)
    assert await registry.list("target") == ()
    await registry.register("target", "t", "127.0.0.1:1", ttl_s=30)
    assert [peer.id for peer in await registry.list("target")] == ["t"]


async def test_an_announced_worker_stays_and_says_goodbye(registry: Registry) -> None:
    beats = 0

    def meta() -> dict[str, str]:
        nonlocal beats
        beats += 1
        return {"beat": str(beats)}

    async with registry.announce("target", "t", "127.0.0.1:1", meta, ttl_s=30.0, period_s=0.02):
        async with asyncio.timeout(30):
            while int((await registry.list("target"))[0].meta["beat"]) < 3:
                await asyncio.sleep(0.02)
    assert await registry.list("target") == ()


async def test_a_watcher_sees_comings_and_goings(registry: Registry) -> None:
    watcher = registry.watch("target", period_s=0.02)
    seen = [await anext(watcher)]
    await registry.register("target", "t", "127.0.0.1:1")
    seen.append(await anext(watcher))
    await registry.remove("target", "t")
    seen.append(await anext(watcher))
    assert [[peer.id for peer in peers] for peers in seen] == [[], ["t"], []]


async def test_announcing_survives_a_server_that_is_away(tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path)
    redis = connect(server.url, socket_timeout_s=PATIENCE_S)
    registry = Registry(redis)
    with pytest.raises(StoreUnreachable):
        await registry.list("target")
    async with registry.announce("target", "t", "127.0.0.1:1", period_s=0.02):
        with server:
            async for peers in registry.watch("target", period_s=0.02):
                if peers:
                    break
            assert [peer.id for peer in peers] == ["t"]
    await redis.aclose()
