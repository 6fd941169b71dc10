"""The ranks of a target group as Ray actors, one in each further bundle of the leader's placement group.

Ray gives them a place and a process; no step passes through it. They belong to the leader's process: if that dies, Ray
ends them. They are not restarted by themselves, because a gang starts anew as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util import get_node_ip_address
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from services.entry import EXIT_FAULT, set_up_process
from services.target import rank
from services.target.rank_processes import Ranks
from services.target.rank_spec import RankSpec, on_device_of


class RankActor:
    """One rank's process. `run` never returns: the process ends with it."""

    async def run(self, text: str) -> None:
        """Serve the leader that `text`, a RankSpec as JSON, names."""
        spec = RankSpec.from_json(text)
        node = get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray gives it no types
        rpc = spec.settings.rpc.model_copy(update={"host": node})  # the leader's may be another node's
        settings = spec.settings.model_copy(update={"rpc": rpc})
        spec = replace(spec, settings=on_device_of(settings, 0))  # Ray shows an actor its own GPU alone
        set_up_process(f"target-{spec.rank}", spec.settings)
        try:
            await rank.run(spec)
        finally:
            os._exit(EXIT_FAULT)  # a thread may hang in an exchange with a rank that is gone


class _Actors:
    def __init__(self) -> None:
        self.actors: list[Any] = []
        self.running: list[Any] = []  # object references, which fail when their actor ends

    async def first_end(self) -> str:
        waiting = {asyncio.ensure_future(_ended(each)): place for place, each in enumerate(self.running, start=1)}
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        return "; ".join(f"rank {waiting[task]}: {task.result()}" for task in done)

    async def kill(self) -> None:
        for actor in self.actors:
            ray.kill(actor)


async def _ended(running: Any) -> str:
    try:
        await running
    except RayActorError as error:
        return str(error).strip().splitlines()[0]
    return "it ended"


@contextlib.asynccontextmanager
async def rank_actors(specs: Sequence[RankSpec]) -> AsyncIterator[Ranks]:
    """Start an actor for each spec: rank r in bundle r. Call it in a replica that has a placement group."""
    group = get_current_placement_group()
    assert group is not None, "the target deployment asks for a placement group when it has several ranks"
    started = _Actors()
    try:
        for spec in specs:
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=spec.rank)
            bundle = group.bundle_specs[spec.rank]
            share = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
            actor: Any = ray.remote(**share, max_restarts=0, scheduling_strategy=place)(RankActor).remote()
            started.actors.append(actor)
            started.running.append(actor.run.remote(spec.to_json()))
        yield started
    finally:
        await started.kill()
