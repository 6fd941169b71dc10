"""The target process: the main model behind one gRPC port, linked to a proposer of its own or of the registry."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from services.accounts import AccountBook
from services.fault_points import fault_points
from services.rpc.channel import new_server
from services.rpc.discovery import Discover, discover
from services.rpc.identity import new_id
from services.rpc.serving import at_most, open_registry, served, until_stopped
from services.rpc.wire import target_rpc
from services.settings import Settings
from services.target.colocated import Link, open_link
from services.target.leader import StartRanks, open_gang
from services.target.rank_processes import rank_processes
from services.target.servicer import TargetServicer
from services.target.simulated import SimulatedProposer, simulated_engine
from services.target.step_thread import StepEngine, StepThread
from services.target.worker import load, open_target, until_broken
from services.telemetry import exporting

log = logging.getLogger(__name__)

Watch = Callable[[], Coroutine[Any, Any, None]]


async def run(settings: Settings, stop: asyncio.Event, start_ranks: StartRanks = rank_processes) -> None:
    """Serve until `stop`, then until every coordinator has moved its requests, or finished them, or `drain_s` is over.

    Raises TargetIncomplete when the model cannot be served, InternalError when a step broke, Unavailable when a rank of
    the group is lost.

    Without a proposer it serves all the same: plain decoding, and a new look for one every moment.
    """
    group_id = new_id("target")
    with exporting("target", group_id):
        async with (
            open_registry(settings) as registry,
            _engine(settings, discover(registry, "proposer", group_id), group_id, start_ranks) as (engine, link, watch),
        ):
            steps = StepThread(engine, reached=fault_points("target", settings))
            server, servicer = new_server(), TargetServicer(steps, engine.info(), link)
            target_rpc.add_TargetServicer_to_server(servicer, server)
            port = settings.rpc.target_port
            name = settings.model.served_name or engine.info().model
            account = AccountBook(registry.redis).keep(lambda: steps.account(group_id, name))
            try:
                async with served(server, registry, settings, kind="target", id=group_id, port=port) as presence:
                    log.info("%s of %s serves at %s", group_id, engine.info().model, presence.address)

                    async def drain() -> None:
                        servicer.drain()
                        await presence.announcement.withdraw()
                        await at_most(settings.drain_s, lambda: servicer.num_held == 0)

                    beside = (link.run(), steps.watch(), until_broken(steps), watch(), account)
                    await until_stopped(stop, *beside, drain=drain)
            finally:
                steps.close()


@contextlib.asynccontextmanager
async def _engine(
    settings: Settings, proposers: Discover, group_id: str, start_ranks: StartRanks
) -> AsyncIterator[tuple[StepEngine, Link, Watch]]:
    """The group's engine, its proposer, and what to run beside them to hear of a lost rank."""
    if settings.simulated is not None:
        yield simulated_engine(settings, group_id), SimulatedProposer(), _nothing_to_watch
        return
    checkpoint = await asyncio.to_thread(open_target, settings)
    link = await open_link(settings, checkpoint, proposers)
    if settings.engine.target_ranks == 1:
        yield await asyncio.to_thread(load, settings, checkpoint, link, group_id), link, _nothing_to_watch
        return
    async with open_gang(settings, checkpoint, link, group_id, start_ranks) as gang:
        yield gang.engine, link, gang.watch


async def _nothing_to_watch() -> None:
    await asyncio.Event().wait()
