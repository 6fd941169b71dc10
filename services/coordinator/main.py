"""The coordinator process: the round driver on a remote target group and the frontier store, behind one gRPC port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from tokenizers import Tokenizer

from seqmtp_serve.checkpoint.gguf_header import read_gguf_header
from seqmtp_serve.checkpoint.locate import locate
from seqmtp_serve.checkpoint.tokenizer import gguf_tokenizer, hf_tokenizer
from seqmtp_serve.request import Request
from seqmtp_serve.rounds import RoundDriver
from services.coordinator.leases import hand_back, keep_leases
from services.coordinator.owners import Owners
from services.coordinator.reader import RequestReader
from services.coordinator.recovery_scan import RecoveryScan
from services.coordinator.servicer import CoordinatorServicer
from services.coordinator.target_link import GrpcTargetGroup
from services.core_config import scheduler_config
from services.detokenizer import Detokenizer
from services.fault_points import fault_points
from services.registry import Registry
from services.rpc.channel import new_server
from services.rpc.discovery import discover
from services.rpc.identity import new_id
from services.rpc.serving import open_registry, served, store_url, until_stopped
from services.rpc.wire import coordinator_rpc
from services.settings import Settings
from services.store.client import RedisFrontierStore
from services.store.pressure import StorePressure
from services.telemetry import exporting

log = logging.getLogger(__name__)


async def run(settings: Settings, stop: asyncio.Event) -> None:
    """Serve until `stop`. Target groups, and even the store, may come and go meanwhile."""
    coordinator_id = new_id("coordinator")
    tokenizer = await asyncio.to_thread(_open_tokenizer, settings)
    server = new_server()
    with exporting("coordinator", coordinator_id):
        async with (
            open_registry(settings) as registry,
            _driving(settings, registry, coordinator_id, tokenizer) as (servicer, scan),
        ):
            coordinator_rpc.add_CoordinatorServicer_to_server(servicer, server)
            port = settings.rpc.coordinator_port
            async with served(server, registry, settings, kind="coordinator", id=coordinator_id, port=port) as address:
                log.info("%s serves at %s", coordinator_id, address)
                await until_stopped(stop, scan.keep(registry, settings.registry.period_s))


@contextlib.asynccontextmanager
async def _driving(
    settings: Settings, registry: Registry, coordinator_id: str, tokenizer: Tokenizer
) -> AsyncIterator[tuple[CoordinatorServicer, RecoveryScan]]:
    """The driver with its target link and store, closed in the order that loses no row and cancels no request."""
    store = RedisFrontierStore(store_url(settings), settings.store)
    target = GrpcTargetGroup(discover(registry, "target", coordinator_id))
    driver = RoundDriver(
        target,
        store,
        scheduler_config(settings),
        _decoders(tokenizer),
        owner=coordinator_id,
        reached=fault_points("coordinator", settings),
    )
    owners = Owners(coordinator_id, registry, lease_s=settings.scheduler.lease_s)
    grace_s = settings.scheduler.reader_grace_s
    reader = RequestReader(driver, store, owners, grace_s=grace_s)
    limit = settings.store.max_memory_mb
    pressure = StorePressure(
        store.redis,
        limit_bytes=None if limit is None else limit * 2**20,
        window_s=settings.store.replay_window_s,
    )
    servicer = CoordinatorServicer(coordinator_id, driver, target, reader, admit=pressure.check, grace_s=grace_s)
    scan = RecoveryScan(store, reader, owners, is_live=driver.is_live, adopted=servicer.expect_reader_back)
    await driver.start()
    background = [
        asyncio.create_task(keep_leases(driver.owned, store, settings.scheduler.lease_s, driver.renewed)),
        asyncio.create_task(target.watch(settings.registry.period_s)),
        asyncio.create_task(pressure.keep()),
    ]
    try:
        yield servicer, scan
    finally:
        for task in background:
            task.cancel()
        servicer.close()
        owned = driver.owned()
        await driver.close()
        await hand_back(owned, store)
        await target.close()
        await store.close()


def _open_tokenizer(settings: Settings) -> Tokenizer:
    """From the checkpoint's header alone: a coordinator reads no weights, and imports no torch."""
    target = locate(settings.model.path).target
    return gguf_tokenizer(read_gguf_header(target).metadata) if target.is_file() else hf_tokenizer(target)


def _decoders(tokenizer: Tokenizer) -> Callable[[Request], Callable[[int], str]]:
    """Text pieces for the finish checker: the very ones the gateway shows."""
    return lambda request: Detokenizer(tokenizer, request.prompt_ids)
