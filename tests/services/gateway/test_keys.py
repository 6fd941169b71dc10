"""API keys: several, each compared; taken anew from their file; held to their limits with a 429 that says when."""

from __future__ import annotations

import hmac
import logging
import os
from pathlib import Path

import pytest

from seqmtp_serve.errors import InvalidField, RateLimited
from seqmtp_serve.live_requests import CALLER
from services.gateway import keys
from services.gateway.keys import Key, KeyRing, parse_keys
from services.gateway.limits import OwnLimits
from services.settings import GatewaySettings, Settings
from tests.services.gateway.world import CHAT, MESSAGES, fake, http


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def test_a_file_has_a_key_a_line() -> None:
    text = "# callers\nfirst\n\nsecond name=batch requests=60 tokens=1e4  # nightly\n"
    one, two = parse_keys(text)
    assert (one.secret, one.name, one.requests, one.tokens) == (b"first", "key2", None, None)
    assert (two.secret, two.name, two.requests, two.tokens) == (b"second", "batch", 60, 10_000)
    assert "second" not in repr(two)


@pytest.mark.parametrize(
    "text", ["", "# none", "k3y color=red", "k3y requests=0", "k3y tokens=nan", "k3y requests=many"]
)
def test_a_file_that_cannot_be_right_is_refused_without_quoting_it(text: str) -> None:
    with pytest.raises(InvalidField) as refused:
        parse_keys(text)
    assert "k3y" not in str(refused.value)


def test_every_key_is_compared_whatever_matched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a1\nb2\nc3\n")
    compared: list[bytes] = []
    really = hmac.compare_digest

    def spy(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return really(one, other)

    monkeypatch.setattr(keys.hmac, "compare_digest", spy)
    found = KeyRing(None, file).find(b"a1")
    assert found is not None
    assert found.secret == b"a1"
    assert compared == [b"a1", b"b2", b"c3"]


def test_keys_rotate_with_their_file_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, clock = tmp_path / "keys", Clock()
    file.write_text("old requests=1\n")
    ring, limits = KeyRing(None, file, clock), OwnLimits(clock)
    old = ring.find(b"old")
    assert old is not None
    limits.take(old)

    def rewrite(text: str, nanoseconds: int) -> None:
        file.write_text(text)
        os.utime(file, ns=(nanoseconds, nanoseconds))
        clock.now += keys.LOOK_AGAIN_S

    rewrite("old requests=1\nnew\n", 1)
    assert ring.find(b"new") is not None
    again = ring.find(b"old")
    assert again is not None
    with pytest.raises(RateLimited):
        limits.take(again)  # what it used stays used
    rewrite("new\n", 2)
    assert ring.find(b"old") is None
    with caplog.at_level(logging.ERROR):
        rewrite("", 3)
        assert ring.find(b"new") is not None
    assert "stay as they were" in caplog.text
    file.unlink()
    clock.now += keys.LOOK_AGAIN_S
    assert ring.find(b"new") is not None


def test_requests_and_tokens_come_back_with_time() -> None:
    clock = Clock()
    key, limits = Key(secret=b"k", name="k", requests=2, tokens=100), OwnLimits(clock)
    limits.take(key)
    limits.take(key)
    with pytest.raises(RateLimited) as refused:
        limits.take(key)
    assert refused.value.retry_after_s == pytest.approx(30)
    clock.now += 30
    limits.take(key)
    limits.used(key, 150)
    clock.now += 30
    with pytest.raises(RateLimited, match="tokens"):
        limits.take(key)  # 100 - 150 + 50: at the end of the bucket, not above it
    clock.now += 1
    limits.take(key)
    clock.now += 3600
    for _ in range(2):
        limits.take(key)
    with pytest.raises(RateLimited):
        limits.take(key)  # an hour of rest saves up no more than a minute's worth


async def test_over_http(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("free\nfew requests=2\nshort tokens=25\n")
    settings = Settings(gateway=GatewaySettings(api_key_file=file))
    body = {"messages": MESSAGES}
    async with http(fake(), settings) as client:

        async def status(secret: str, **more: object) -> int:
            return (await client.post(CHAT, json={**body, **more}, headers=bearer(secret))).status_code

        assert [await status("few") for _ in range(3)] == [200, 200, 429]
        refused = await client.post(CHAT, json=body, headers=bearer("few"))
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert (await client.get("/v1/models", headers=bearer("few"))).status_code == 200, "reading is free"
        assert [await status("short", stream=True), await status("short", stream=True)] == [200, 429], "20 + 7 tokens"
        assert [await status("free") for _ in range(5)] == [200] * 5
        assert await status("other") == 401


async def test_a_request_carries_its_keys_name_as_its_caller(tmp_path: Path) -> None:
    """By it the scheduler lets callers take turns (`test_overload.py`); the key itself goes nowhere."""
    file = tmp_path / "keys"
    file.write_text("s3cret-a name=chat\ns3cret-b name=batch\n")
    coordinator = fake()
    async with http(coordinator, Settings(gateway=GatewaySettings(api_key_file=file))) as client:
        for secret in ("s3cret-b", "s3cret-a"):
            await client.post(CHAT, json={"messages": MESSAGES}, headers=bearer(secret))
    assert [meta[CALLER] for meta in coordinator.meta] == ["batch", "chat"]
    assert "s3cret" not in repr(coordinator.meta)


def test_a_gateway_without_its_key_file_does_not_start_open(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="cannot be read"):
        KeyRing(None, tmp_path / "missing")
