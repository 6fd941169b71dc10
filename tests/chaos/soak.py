"""Many short requests through real processes: does anything grow with their number?

    python -m tests.chaos.soak --requests 10000 --out results/soak.json

One worker a role and a tiny random model. After every tenth of the requests the run waits until the store holds only
what it held before the first (the replay window is two seconds), then reads the store's data size and each worker's
resident memory. Ends with 1 when a request failed or a record was left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
import redis.asyncio as redis
from tqdm import tqdm

from services.bench.machine import describe_machine
from services.free_port import free_port
from services.settings import EngineSettings, GatewaySettings, ModelSettings, Settings, StoreSettings
from tests.services.cluster import Cluster, cluster
from tests.services.tiny_model import write_tiny_model

ROLES = ("target", "proposer", "coordinator", "gateway")
IN_FLIGHT = 16


async def ask(client: httpx.AsyncClient, number: int) -> bool:
    """Whether one request of 1 to 8 tokens got all of them; every fourth is seeded."""
    wanted = 1 + number % 8
    body: dict[str, Any] = {"prompt": [5 + number % 40, 6, 7], "max_tokens": wanted, "ignore_eos": True}
    body["temperature"] = 0
    if number % 4 == 0:
        body |= {"temperature": 0.8, "seed": number}
    reply = await client.post("/v1/completions", json=body, timeout=60)
    return reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == wanted


async def settled(store: redis.Redis, before: int) -> int:
    """Keys of the store once it has removed every record; it does so some time after their window ends."""
    async with asyncio.timeout(120):
        while (size := await store.dbsize()) > before:
            await asyncio.sleep(0.2)
    return int(size)


def resident_mib() -> dict[str, float]:
    """Of each worker this process started."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        role = next((role for role in ROLES if f"services.{role}" in child.cmdline()), None)
        if role is not None:
            found[role] = round(child.memory_info().rss / 2**20, 1)
    return found


async def soak(workers: Cluster, num_requests: int) -> dict[str, Any]:
    """All requests, ten readings."""
    await workers.ready()
    store = redis.Redis.from_url(workers.settings.store.url or "")
    before = await store.dbsize()
    base = f"http://127.0.0.1:{workers.settings.gateway.port}"
    readings, failed, began = [], 0, time.monotonic()
    async with httpx.AsyncClient(base_url=base) as client:
        gate = asyncio.Semaphore(IN_FLIGHT)

        async def one(number: int) -> bool:
            async with gate:
                return await ask(client, number)

        for part in tqdm(range(10), unit="tenth"):
            numbers = range(part * num_requests // 10, (part + 1) * num_requests // 10)
            failed += (await asyncio.gather(*map(one, numbers))).count(False)
            reading = {
                "requests": numbers.stop,
                "store_keys": await settled(store, before),
                "resident_mib": resident_mib(),
            }
            readings.append(reading | {"store_bytes": (await store.info("memory"))["used_memory_dataset"]})
    await store.aclose()
    return {"failed": failed, "seconds": round(time.monotonic() - began, 1), "readings": readings}


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=Path("results/soak.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        model = write_tiny_model(Path(folder))
        settings = Settings(
            model=ModelSettings(path=str(model), mtp=str(model.parent / "tiny-mtp")),
            engine=EngineSettings(max_model_len=200, max_num_seqs=IN_FLIGHT, weights="fp32"),
            store=StoreSettings(replay_window_s=2.0),
            gateway=GatewaySettings(port=free_port()),
        )
        with cluster(Path(folder), settings) as workers:
            workers.start(*ROLES)
            outcome = asyncio.run(soak(workers, options.requests))
    about = {"date": datetime.now(UTC).date().isoformat(), "machine": describe_machine(), "requests": options.requests}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(about | outcome, indent=1) + "\n")
    print(json.dumps(about | outcome, indent=1))
    return int(outcome["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
