"""One embedded Valkey a session; each test gets it empty."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.store.client import RedisFrontierStore
from services.store.embedded import EmbeddedValkey
from tests.patience import PATIENT


@pytest.fixture(scope="session")
def session_valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(tmp_path_factory.mktemp("valkey")) as running:
        yield running


@pytest.fixture
async def store(session_valkey: EmbeddedValkey) -> AsyncIterator[RedisFrontierStore]:
    client = RedisFrontierStore(session_valkey.url, PATIENT)
    await client.redis.flushall()
    yield client
    await client.close()


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    """A server that the test may stop, kill or restart."""
    with EmbeddedValkey(tmp_path / "own") as running:
        yield running
