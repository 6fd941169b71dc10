"""Stores under contract: in memory, on the embedded Valkey, and on a `redis-server` where one is installed."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from seqmtp_serve.frontier.memory_store import MemoryFrontierStore
from seqmtp_serve.ports import FrontierStore
from services.store.client import RedisFrontierStore
from services.store.embedded import EmbeddedValkey
from tests.patience import PATIENT

REDIS_SERVER = shutil.which("redis-server")
SERVERS = ["valkey"] if REDIS_SERVER is None else ["valkey", "redis"]
WINDOW_S = 0.4  # of a store whose records are to lapse while a test waits


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
    async with opened(request.param, tmp_path_factory, 600.0) as found:
        yield found


@pytest.fixture(params=["memory", *SERVERS])
async def forgetful_store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[FrontierStore]:
    """Its replay window is `WINDOW_S`."""
    async with opened(request.param, tmp_path_factory, WINDOW_S) as found:
        yield found


@asynccontextmanager
async def opened(kind: str, folders: pytest.TempPathFactory, replay_window_s: float) -> AsyncIterator[FrontierStore]:
    """A store of this kind, alone on a server of its own."""
    if kind == "memory":
        yield MemoryFrontierStore(replay_window_s=replay_window_s)
        return
    binary = Path(REDIS_SERVER) if kind == "redis" and REDIS_SERVER else None
    with EmbeddedValkey(folders.mktemp(kind), binary=binary) as running:
        client = RedisFrontierStore(running.url, PATIENT.model_copy(update={"replay_window_s": replay_window_s}))
        yield client
        await client.close()
