"""A key's limits hold over all gateways of one store; without the store each gateway holds them by itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from redis.asyncio import Redis

from seqmtp_serve.errors import RateLimited
from services.gateway.app import create_app
from services.gateway.keys import Key
from services.gateway.limits import OwnLimits, SharedLimits
from services.settings import GatewaySettings, Settings
from services.store.connection import connect
from services.store.embedded import EmbeddedValkey
from tests.patience import PATIENCE_S
from tests.services.gateway.test_keys import bearer
from tests.services.gateway.world import CHAT, MESSAGES, TEXT, fake

FEW = Key(secret=b"secret few", name="few", requests=4)


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(tmp_path_factory.mktemp("valkey")) as running:
        yield running


@pytest.fixture
async def redis(valkey: EmbeddedValkey) -> AsyncIterator[Redis]:
    async with connect(valkey.url, socket_timeout_s=PATIENCE_S) as opened:
        await opened.flushall()
        yield opened


async def granted(limits: SharedLimits | OwnLimits, key: Key, tries: int) -> int:
    """How many of so many requests begin."""
    number = 0
    for _ in range(tries):
        with contextlib.suppress(RateLimited):
            await limits.begin(key)
            number += 1
    return number


@contextlib.asynccontextmanager
async def gateway(redis: Redis, keys: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(
        Settings(gateway=GatewaySettings(api_key_file=keys)), fake(), TEXT, limits=SharedLimits(redis, OwnLimits())
    )
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://g") as client:
        yield client


async def test_two_gateways_share_one_limit_over_http(redis: Redis, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("few requests=4\nshort tokens=60\nfree\n")
    async with gateway(redis, keys) as one, gateway(redis, keys) as other:

        async def status(client: httpx.AsyncClient, secret: str) -> int:
            return (await client.post(CHAT, json={"messages": MESSAGES}, headers=bearer(secret))).status_code

        assert [await status(client, "few") for client in (one, other, one, other)] == [200] * 4
        assert [await status(client, "few") for client in (one, other)] == [429, 429]
        refused = await other.post(CHAT, json={"messages": MESSAGES}, headers=bearer("few"))
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["retry-after"]) <= 15
        assert [await status(client, "short") for client in (one, one, one)] == [200] * 3, "27 tokens each"
        async with asyncio.timeout(20):
            while await status(other, "short") == 200:  # what the one used has reached the store
                await asyncio.sleep(0.02)
        assert [await status(client, "free") for client in (one, other)] == [200, 200]
    names = [name.decode() for name in await redis.keys("seqmtp:limit:*")]
    assert len(names) == 2
    assert not any("few" in name or "short" in name for name in names), "no secret lies in the store"


async def test_the_shared_form_grants_what_the_plain_one_grants(redis: Redis) -> None:
    """Each request at another gateway, so that only the store's buckets decide."""
    for number, (requests, tokens, tries) in enumerate([(3, None, 5), (None, 50, 6), (5, 40, 7), (2, 1000, 4)]):
        key = Key(secret=b"k%d" % number, name="k", requests=requests, tokens=tokens)
        plain = OwnLimits(lambda: 0.0)

        async def outcomes(plain: OwnLimits | None, key: Key = key, tries: int = tries) -> list[str]:
            found = []
            for _ in range(tries):
                limits = plain or SharedLimits(redis)
                try:
                    await limits.begin(key)
                except RateLimited as refused:
                    found.append(str(refused))
                    continue
                limits.used(key, 15)
                found.append("")
                if isinstance(limits, SharedLimits):
                    await limits.tell()
            return found

        expected = await outcomes(plain)
        assert await outcomes(None) == expected
        assert "" in expected
        assert any(expected)


async def test_what_is_taken_comes_back_by_the_stores_clock(redis: Redis) -> None:
    quick = Key(secret=b"quick", name="quick", requests=600)  # ten a second
    one, other = SharedLimits(redis), SharedLimits(redis)
    assert await granted(one, quick, 700) >= 600
    with pytest.raises(RateLimited) as refused:
        for _ in range(600):  # its own bucket is full, the shared one is not
            await other.begin(quick)
    assert 0 < refused.value.retry_after_s <= 0.2
    async with asyncio.timeout(20):
        while not await granted(other, quick, 1):
            await asyncio.sleep(0.02)
    assert 0 < await redis.pttl((await redis.keys("seqmtp:limit:*"))[0]) <= 61_000, "a full bucket is forgotten"


async def test_a_refusal_costs_no_request_of_this_gateways_own(redis: Redis) -> None:
    one, other = SharedLimits(redis), SharedLimits(redis)
    assert await granted(one, FEW, 4) == 4
    assert await granted(other, FEW, 40) == 0
    await redis.flushall()
    assert await granted(other, FEW, 5) == 4


async def test_without_the_store_each_gateway_decides_alone_and_later_tells(
    valkey: EmbeddedValkey, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    key = Key(secret=b"away", name="away", requests=3, tokens=100)
    away = SharedLimits(connect("redis://127.0.0.1:1"))
    assert await granted(away, key, 5) == 3
    assert caplog.text.count("at this gateway alone") == 1
    away.used(key, 500)
    await away.tell()
    away._store = SharedLimits(redis)._store  # it is back
    await away.tell()
    with pytest.raises(RateLimited, match="tokens"):
        await SharedLimits(redis).begin(key)
