"""Stores under contract: in memory, on the embedded Valkey, and on a `redis-server` where one is installed."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from seqmtp_serve.frontier.memory_store import MemoryFrontierStore
from seqmtp_serve.ports import FrontierStore
from services.settings import StoreSettings
from services.store.client import RedisFrontierStore
from services.store.embedded import EmbeddedValkey

REDIS_SERVER = shutil.which("redis-server")
SERVERS = ["valkey"] if REDIS_SERVER is None else ["valkey", "redis"]
WINDOW_S = 0.4


def pytest_report_header() -> str:
    found = REDIS_SERVER or "not installed: the store contract runs on the embedded Valkey and in memory only"
    return f"redis-server: {found}"


@pytest.fixture(scope="session", params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    binary = Path(REDIS_SERVER) if request.param == "redis" and REDIS_SERVER else None
    with EmbeddedValkey(tmp_path_factory.mktemp(request.param), binary=binary) as running:
        yield running


@pytest.fixture(params=["memory", *SERVERS])
async def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[FrontierStore]:
    if request.param == "memory":
        yield MemoryFrontierStore(replay_window_s=WINDOW_S)
        return
    binary = Path(REDIS_SERVER) if request.param == "redis" and REDIS_SERVER else None
    with EmbeddedValkey(tmp_path_factory.mktemp(request.param), binary=binary) as running:
        client = RedisFrontierStore(running.url, StoreSettings(replay_window_s=WINDOW_S))
        yield client
        await client.close()
