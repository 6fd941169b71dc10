"""Rank 0 of a target group of several: it starts the others, forms the group, and ends it when one is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.engine.target import TargetEngine
from seqmtp_serve.errors import Unavailable
from seqmtp_serve.model.device import usable_device
from seqmtp_serve.model.family import chosen_kernels
from seqmtp_serve.tasks import end_tasks
from services.core_config import engine_config
from services.rpc.channel import bind, new_server
from services.rpc.wire import gang_rpc
from services.settings import Settings
from services.target.colocated import Link
from services.target.crew import Crew
from services.target.gang_engine import GangEngine
from services.target.process_group import form, open_rendezvous
from services.target.rank_processes import Ranks
from services.target.rank_spec import RankSpec, on_device_of
from services.target.worker import group_library, load

StartRanks = Callable[[Sequence[RankSpec]], AbstractAsyncContextManager[Ranks]]
T = TypeVar("T")

log = logging.getLogger(__name__)


class Gang:
    """The formed group: its engine, and `watch` beside it."""

    def __init__(self, engine: GangEngine, crew: Crew, ranks: Ranks) -> None:
        self.engine = engine
        self._crew, self._ranks = crew, ranks

    async def watch(self) -> None:
        """Until a rank is lost: ends the others and raises Unavailable."""
        try:
            await _unless_one_ends(self._ranks, self._crew, self._crew.watch())
        finally:
            await self._ranks.kill()  # at once: a step may hang in an exchange with one that is stopped


@contextlib.asynccontextmanager
async def open_gang(
    settings: Settings, checkpoint: Checkpoint, link: Link, group_id: str, start_ranks: StartRanks
) -> AsyncIterator[Gang]:
    """A gang as long as the block.

    Raises Unavailable when a rank does not come up, TargetIncomplete as `load` does, InvalidField before it starts any.
    """
    own = on_device_of(settings, 0)
    library, device = group_library(own, checkpoint), usable_device(own.engine.device)
    chosen_kernels(engine_config(own), checkpoint.config)
    world_size, host = settings.engine.target_ranks, settings.rpc.host
    crew = Crew(group_id, world_size, checkpoint.manifest.fingerprint)
    server = new_server()
    gang_rpc.add_GangServicer_to_server(crew, server)
    port = bind(server, host, 0).rpartition(":")[2]
    store, rendezvous = open_rendezvous(host, world_size)
    specs = [
        RankSpec(
            gang_id=group_id,
            rank=rank,
            world_size=world_size,
            leader=f"{settings.rpc.public_host}:{port}",
            rendezvous=f"{settings.rpc.public_host}:{rendezvous.rpartition(':')[2]}",
            settings=settings,
        )
        for rank in range(1, world_size)
    ]

    def join_and_load() -> TargetEngine:
        form(store, 0, world_size, host, library, device)
        return load(own, checkpoint, link, group_id)

    await server.start()
    try:
        async with start_ranks(specs) as ranks:
            await _unless_one_ends(ranks, crew, crew.joined())
            crew.form()
            engine = await _unless_one_ends(ranks, crew, asyncio.to_thread(join_and_load))
            infos = await _unless_one_ends(ranks, crew, crew.ready())
            log.info("%s is formed: %d ranks", group_id, world_size)
            yield Gang(GangEngine(engine, crew, infos), crew, ranks)
    finally:
        await server.stop(0)


async def _unless_one_ends(ranks: Ranks, crew: Crew, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Raises Unavailable if a rank ends first."""
    working, ending = asyncio.create_task(work), asyncio.create_task(ranks.first_end())
    try:
        await asyncio.wait((working, ending), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            await crew.lose(ending.result())
            raise Unavailable(ending.result())
        return working.result()
    finally:
        await end_tasks(working, ending)
