"""A store and its replica, the link between them through a proxy: the replica can be made to lag, then to take over."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from redis.asyncio import Redis

from services.free_port import free_port
from services.store.durability import Durability
from services.store.embedded import EmbeddedValkey
from services.store.records import STATES, request_id_of
from tests.chaos.rig.proxy import Proxy
from tests.chaos.rig.store_log import Record


class StoreAndReplica:
    """`primary` takes writes. Each fail-over promotes the replica, and gives it a new one of its own."""

    def __init__(self, folder: Path, durability: Durability) -> None:
        self._folder, self._durability, self._number = folder, durability, 0
        self._port = free_port()
        self.primary = EmbeddedValkey(folder / "store-0", durability=durability, port=self._port)

    async def start(self) -> None:
        """Both, in step."""
        self.primary.start()
        await self._start_replica()

    async def in_step(self) -> None:
        """Until the replica has all that the primary has, and writes it down."""
        async with Redis.from_url(self._replica.url) as redis:
            while True:
                link, file = await redis.info("replication"), await redis.info("persistence")
                if link.get("master_link_status") == "up" and not file["aof_rewrite_in_progress"]:
                    return
                await asyncio.sleep(0.05)

    async def promote(self, lag_s: float) -> dict[str, Record]:
        """Nothing reaches the replica for `lag_s`, the primary is killed, the replica takes over: its records."""
        self._link.fall_silent()
        await asyncio.sleep(lag_s)
        assert self.primary.pid is not None
        os.kill(self.primary.pid, signal.SIGKILL)
        self.primary.stop()
        await self._link.stop()
        self.primary, self._port = self._replica, self._replica_port
        async with Redis.from_url(self.primary.url) as redis:
            await redis.replicaof("NO", "ONE")
            states = [key async for key in redis.scan_iter(STATES)]
            found = [await redis.hmget(state, "epoch", "version") for state in states]
        return {
            request_id_of(state): Record(epoch=int(epoch), version=int(version))
            for state, (epoch, version) in zip(states, found, strict=True)
            if epoch is not None
        }

    async def renew_replica(self) -> None:
        """A new, empty replica for the primary there is now."""
        await self._start_replica()

    async def stop(self) -> None:
        """End both."""
        await self._link.stop()
        self._replica.stop()
        self.primary.stop()

    async def _start_replica(self) -> None:
        self._number += 1
        through, self._replica_port = free_port(), free_port()
        self._link = Proxy(("127.0.0.1", through), ("127.0.0.1", self._port))
        await self._link.start()
        self._replica = EmbeddedValkey(
            self._folder / f"store-{self._number}",
            durability=self._durability,
            port=self._replica_port,
            replica_of=through,
        )
        await asyncio.to_thread(self._replica.start)
        async with asyncio.timeout(30):
            await self.in_step()
