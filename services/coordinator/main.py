"""The coordinator process: the round driver on a remote target group and the frontier store, behind one gRPC port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from seqmtp_serve.checkpoint.gguf_header import read_gguf_header
from seqmtp_serve.checkpoint.locate import locate
from seqmtp_serve.checkpoint.tokenizer import gguf_tokenizer, hf_tokenizer
from seqmtp_serve.errors import StoreUnreachable
from seqmtp_serve.request import Request
from seqmtp_serve.rounds import RoundDriver
from seqmtp_serve.tasks import end_tasks
from services.accounts import AccountBook
from services.coordinator.leases import hand_back, keep_leases
from services.coordinator.owners import Owners
from services.coordinator.reader import RequestReader
from services.coordinator.recovery_scan import RecoveryScan
from services.coordinator.round_ledger import RoundLedger
from services.coordinator.round_spans import RoundSpans
from services.coordinator.servicer import CoordinatorServicer
from services.coordinator.target_link import GrpcTargetGroup
from services.core_config import scheduler_config
from services.detokenizer import Detokenizer
from services.fault_points import fault_points
from services.registry import DRAINING, Registry
from services.rpc.channel import new_server
from services.rpc.discovery import discover
from services.rpc.identity import new_id
from services.rpc.serving import open_registry, served, store_url, until_stopped
from services.rpc.wire import coordinator_rpc
from services.settings import Settings
from services.store.client import RedisFrontierStore
from services.store.notes import NoteStore
from services.store.pressure import StorePressure
from services.telemetry import exporting

LOOK_FOR_ANOTHER_S = 0.1

log = logging.getLogger(__name__)


async def run(settings: Settings, stop: asyncio.Event) -> None:
    """Serve until `stop`; then hand over to another coordinator, or finish what is read, within `drain_s`.

    Target groups, and even the store, may come and go meanwhile.
    """
    coordinator_id = new_id("coordinator")
    tokenizer = await asyncio.to_thread(_open_tokenizer, settings)
    server = new_server()
    with exporting("coordinator", coordinator_id):
        async with (
            open_registry(settings) as registry,
            _driving(settings, registry, coordinator_id, tokenizer) as driving,
        ):
            servicer, driver = driving.servicer, driving.driver
            coordinator_rpc.add_CoordinatorServicer_to_server(servicer, server)

            def meta() -> dict[str, str]:
                return {DRAINING: "1"} if driver.status().draining else {}

            async with served(
                server,
                registry,
                settings,
                kind="coordinator",
                id=coordinator_id,
                port=settings.rpc.coordinator_port,
                meta=meta,
            ) as presence:
                log.info("%s serves at %s", coordinator_id, presence.address)

                async def drain() -> None:
                    driver.retire()
                    await presence.announcement.beat()
                    await _until_read_no_more(servicer, registry, coordinator_id, settings.drain_s)
                    await driving.hand_over()

                await until_stopped(stop, driving.scan.keep(registry, settings.registry.period_s), drain=drain)


async def _until_read_no_more(servicer: CoordinatorServicer, registry: Registry, me: str, longest_s: float) -> None:
    """Let the streams go on here as long as there is no other coordinator to go on with them."""

    async def alone() -> bool:
        with contextlib.suppress(StoreUnreachable):
            return all(peer.id == me or peer.draining for peer in await registry.list("coordinator"))
        return True

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(longest_s):
            while servicer.is_read and await alone():
                await asyncio.sleep(LOOK_FOR_ANOTHER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Driving:
    """A coordinator's insides. `hand_over` ends the rounds and gives every lease back; again, it does nothing."""

    driver: RoundDriver
    servicer: CoordinatorServicer
    scan: RecoveryScan
    hand_over: Callable[[], Coroutine[Any, Any, None]]


@contextlib.asynccontextmanager
async def _driving(
    settings: Settings, registry: Registry, coordinator_id: str, tokenizer: Tokenizer
) -> AsyncIterator[_Driving]:
    """The driver with its target link and store, closed in the order that loses no row and cancels no request."""
    spans = RoundSpans(settings.telemetry.round_sample_ratio)
    store = RedisFrontierStore(store_url(settings), settings.store, spans.commit)
    target = GrpcTargetGroup(discover(registry, "target", coordinator_id), spans)
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
    notes = NoteStore(store.redis, window_s=settings.store.replay_window_s)
    ledger = RoundLedger(driver.notes, notes, reader, owners)
    limit = settings.store.max_memory_mb
    pressure = StorePressure(
        store.redis,
        limit_bytes=None if limit is None else limit * 2**20,
        window_s=settings.store.replay_window_s,
    )
    servicer = CoordinatorServicer(
        coordinator_id,
        driver,
        target,
        reader,
        ledger,
        admit=pressure.check,
        grace_s=grace_s,
        store_levels=pressure.levels,
    )
    scan = RecoveryScan(store, reader, owners, is_live=driver.is_live, adopted=servicer.expect_reader_back)
    account = AccountBook(registry.redis).keep(lambda: servicer.account(settings.model.served_name))
    await driver.start()
    keeping = asyncio.create_task(account)
    background = [
        asyncio.create_task(keep_leases(driver.owned, store, settings.scheduler.lease_s, driver.renewed)),
        asyncio.create_task(target.watch(settings.registry.period_s)),
        asyncio.create_task(pressure.keep()),
        asyncio.create_task(ledger.keep()),
    ]

    async def hand_over() -> None:
        servicer.close()
        owned = driver.owned()
        await driver.close()
        await hand_back(owned, store)
        await ledger.keep_last()
        await end_tasks(keeping)  # with what the driver counted to its end

    try:
        yield _Driving(driver=driver, servicer=servicer, scan=scan, hand_over=hand_over)
    finally:
        await end_tasks(*background)
        await hand_over()
        await target.close()
        await store.close()


def _open_tokenizer(settings: Settings) -> Tokenizer:
    """From the checkpoint's header alone: a coordinator reads no weights, and imports no torch."""
    target = locate(settings.model.path).target
    return gguf_tokenizer(read_gguf_header(target).metadata) if target.is_file() else hf_tokenizer(target)


def _decoders(tokenizer: Tokenizer) -> Callable[[Request], Callable[[int], str]]:
    """Text pieces for the finish checker: the very ones the gateway shows."""
    return lambda request: Detokenizer(tokenizer, request.prompt_ids)
