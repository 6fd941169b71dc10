"""What the rig can do to a service, each fault at a named point of a round.

A fault names whom it harms, seen from the coordinator that waits at the point: itself, the target or the proposer it
works with, a gateway, or the store.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from redis.asyncio import Redis

from seqmtp_serve.fault_points import FaultPoint
from services.store.scripts import COMMIT
from tests.chaos.rig.broken_coordinator import forgetful_commit
from tests.chaos.rig.points import Hit
from tests.chaos.rig.workers import Worker, Workers

PAUSE_S = 2.5
STORE_AWAY_S = 0.5
LAG_S = 0.4  # nothing reaches the replica for so long before it is promoted

COMMITS = tuple(script.sha.encode() for script in (COMMIT, forgetful_commit()))  # the product's, and a control's

Undo = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`role` is who suffers; `how` is a key of `HARMS`."""

    role: str
    how: str
    point: FaultPoint
    at: str = "coordinator"  # whose point it is

    @property
    def outlasts_streams(self) -> bool:
        """Whether it ends only when every stream has: somebody else must go on with them."""
        return self.how.startswith("stay")


async def harm(fault: Fault, hit: Hit, workers: Workers) -> Undo:
    """Do it. The answer ends it: to be awaited when the one who waits at the point has been let go."""
    victim = _victim(fault, hit, workers)
    match fault.how:
        case "kill" if fault.role == "store":
            returning = asyncio.ensure_future(workers.kill_store(STORE_AWAY_S))
            return lambda: returning
        case "kill":
            workers.kill(victim)
            return nothing
        case "drain":
            workers.ask_to_end(victim)
            return lambda: workers.replace(victim)
        case "stop" if fault.role == "store":
            return await _stop_store(workers)
        case "stay stopped":
            workers.pause(victim)
            return lambda: _later(0.0, lambda: workers.go_on(victim))
        case "fail over":
            await workers.fail_over(LAG_S)
            return workers.renew_replica
        case "stop":
            workers.pause(victim)
            return lambda: _later(PAUSE_S, lambda: workers.go_on(victim))
        case "partition" | "stay partitioned":
            workers.unplug(victim)
            lasts_s = 0.0 if fault.outlasts_streams else PAUSE_S
            return lambda: _later(lasts_s, lambda: workers.plug_in(victim))
        case "black hole":
            proxy = workers.store_proxy if fault.role == "store" else victim.proxy
            proxy.fall_silent()
            return lambda: _later(PAUSE_S, proxy.heal)
        case "cut":
            proxy = workers.store_proxy if fault.role == "store" else victim.proxy
            proxy.cut()
            return nothing
        case "lose replies":
            if fault.role == "store":
                workers.store_proxy.lose_replies(2, to=COMMITS)
            else:
                victim.proxy.lose_replies(2)
            return nothing
        case "flush scripts":
            async with Redis.from_url(workers.store.url) as redis:
                await redis.script_flush()
            return nothing
    raise ValueError(f"no such harm: {fault}")


def _victim(fault: Fault, hit: Hit, workers: Workers) -> Worker:
    waiting = workers.with_pid(hit.pid)
    if fault.role == waiting.role or fault.role == "store":
        return waiting
    if fault.role == "gateway":
        return workers.of("gateway")[hit.pid % len(workers.of("gateway"))]
    target = waiting if waiting.role == "target" else workers.peer_of(waiting, "target")
    return target if fault.role == "target" else workers.peer_of(target, "proposer")


async def _stop_store(workers: Workers) -> Undo:
    os.kill(workers.store.pid, signal.SIGSTOP)
    return lambda: _later(PAUSE_S, lambda: os.kill(workers.store.pid, signal.SIGCONT))


async def _later(delay_s: float, act: Callable[[], None]) -> None:
    await asyncio.sleep(delay_s)
    act()


async def nothing() -> None:
    """There is nothing to undo."""


ROLES = ("target", "proposer", "coordinator", "gateway", "store")
LINKS = ("target", "proposer", "coordinator", "store")


def every_pair() -> list[Fault]:
    """Each role at each point, killed and stopped; then each link silent, cut, and losing replies at some point; then
    each role asked to end, and stopped until somebody else has finished what it had.
    """
    pairs = [  # a role's turn comes again late: what was killed is back by then
        Fault(role=role, how=how, point=point) for point in FaultPoint for how in ("kill", "stop") for role in ROLES
    ]
    points = list(FaultPoint)
    links = [
        Fault(role=role, how=how, point=points[(place + shift) % len(points)])
        for shift, how in enumerate(("black hole", "cut", "lose replies"))
        for place, role in enumerate(LINKS)
    ]
    own = [
        Fault(role="target", how=how, point=point, at="target")
        for point in (FaultPoint.BEFORE_PREPARE, FaultPoint.AFTER_VERIFY)
        for how in ("kill", "stop")
    ]
    points_of = {"coordinator": points, "target": points}
    leaving = [  # asked to end, or stopped for good, as far as the streams are concerned
        Fault(role=role, how=how, point=point)
        for how in ("drain", "stay stopped")
        for role in ("coordinator", "target", "proposer", "gateway")
        for point in points_of.get(role, [FaultPoint.AFTER_COMMIT])
    ]
    flush = [Fault(role="store", how="flush scripts", point=FaultPoint.BEFORE_COMMIT)]
    return [*pairs, *links, *own, *leaving, *flush]


def partitions() -> list[Fault]:
    """Each role without its network at each point, for a while; then until somebody else has finished what it had. For
    a service in network namespaces.
    """
    return [
        Fault(role=role, how=how, point=point)
        for how, points in (("partition", list(FaultPoint)), ("stay partitioned", [FaultPoint.AFTER_COMMIT]))
        for point in points
        for role in ROLES
        if role != "store"
    ]


def fail_overs() -> list[Fault]:
    """The store fails over to its replica at each point. For a service that has one."""
    return [Fault(role="store", how="fail over", point=point) for point in FaultPoint]
