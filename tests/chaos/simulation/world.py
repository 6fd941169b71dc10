"""A whole service and its clients under faults, decided by one seed: `simulate(seed)` gives the history to check.

Two coordinators, two target groups, one proposer and one store, for a fraction of a virtual second under faults; then
everything heals and every stream must come to its end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

from seqmtp_serve.config import SchedulerConfig
from seqmtp_serve.fault_points import FaultPoint
from seqmtp_serve.request import Request, SamplingParams
from tests.chaos.history import ClientEvent, History
from tests.chaos.simulation.client import SimClient
from tests.chaos.simulation.coordinator import SimCoordinator
from tests.chaos.simulation.network import Network, Process
from tests.chaos.simulation.parts import Parts
from tests.chaos.simulation.row_link import RowLink
from tests.chaos.simulation.store import LoggedStore
from tests.chaos.simulation.target import SimProposer
from tests.chaos.simulation.virtual_loop import VirtualLoop

FAULTY_S = 0.5  # faults happen within this time, and end soon after
DRAINED = 0.3  # of the schedules, beside their other faults
QUIET_S = 3.0  # after the last stream: time for every release to arrive
SOUND = Parts()


def simulate(seed: int, parts: Parts = SOUND) -> History:
    """One schedule. The same seed gives the same history."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_World(seed, parts).run())


class _World:
    def __init__(self, seed: int, parts: Parts) -> None:
        rng, self.drains = Random(seed), Random(f"drain {seed}")
        self.rng, self.parts = rng, parts
        self.network = Network(rng, loss=rng.choice([0.0, 0.02, 0.1]), slow=rng.choice([0.0, 0.03]))
        self.stale = rng.choice([0.0, 0.05])
        wrong_rows = Random(f"rows {seed}")
        self.link = RowLink(wrong_rows, wrong_rows.choice([0.0, 0.02, 0.2]))
        self.events: list[ClientEvent] = []
        self.happened: list[str] = []
        self.met: Counter[str] = Counter()
        self.server = Process("store")
        self.proposer = SimProposer(self.network)
        self.num_started = 0
        self.starting: set[asyncio.Task[None]] = set()
        self.config = SchedulerConfig(
            max_batch=4,
            step_tokens=24,
            prefill_chunk=5,
            cohorts=rng.choice([1, 2]),
            retry_first_s=0.002,
            retry_max_s=0.05,
            step_deadline_ms=200.0,
            submit_wait_s=0.5,
            store_wait_s=2.0,
            target_wait_s=2.0,
        )

    async def run(self) -> History:
        loop = asyncio.get_running_loop()
        self.store: LoggedStore = self.parts.store(loop.time)
        self.groups = [self.parts.target(name, self.proposer) for name in ("target-1", "target-2")]
        self.coordinators: list[SimCoordinator] = []
        for _ in range(2):
            await self._start_coordinator()
        clients = [
            self.parts.client(
                request,
                self.network,
                self.link,
                lambda: self.coordinators,
                self.events,
                lambda: len(self.store.log),
            )
            for request in self._requests()
        ]
        reading = [asyncio.ensure_future(client.run()) for client in clients]
        for _ in range(self.rng.randint(1, 5)):
            loop.call_later(self.rng.uniform(0, FAULTY_S), self._fault(clients))
        if self.drains.random() < DRAINED:
            loop.call_later(self.drains.uniform(0, FAULTY_S), self._drain, self.drains.randrange(2))
        loop.call_later(2 * FAULTY_S, self._heal)
        await asyncio.gather(*reading)
        await asyncio.sleep(max(0.0, 2 * FAULTY_S - loop.time()) + QUIET_S)
        held = self._held()
        for coordinator in self.coordinators:
            coordinator.driver.scheduler.check()
            await coordinator.driver.close()
            self._account(coordinator)
        self.met.update({"drafts refused": sum(group.num_refused_drafts for group in self.groups)})
        self.met.update({"rows refused": self.link.num_refused})
        return History(
            clients=tuple(self.events),
            store=tuple(self.store.log),
            held_before=dict.fromkeys(held, 0),
            held_after=held,
            met=dict(self.met),
        )

    def _requests(self) -> list[Request]:
        return [
            Request(
                request_id=name,
                prompt_ids=tuple(self.rng.randrange(26) for _ in range(self.rng.randint(1, 12))),
                params=SamplingParams(temperature=0.0, max_tokens=self.rng.randint(1, 20)),
            )
            for name in "abc"[: self.rng.randint(1, 3)]
        ]

    # ---- faults ------------------------------------------------------------------------------------------------

    def _fault(self, clients: list[SimClient]) -> Callable[[], None]:
        """One drawn fault, to be called when its time has come."""
        rng = self.rng
        lasting_s = rng.uniform(0.01, 0.4)
        point, times = rng.choice(list(FaultPoint)), rng.randint(1, 4)
        place = rng.randrange(2)
        match rng.randrange(8):
            case 0:
                return lambda: self._say(f"coordinator {place} dies", self.coordinators[place].kill)
            case 1 | 2:
                what = f"coordinator {place} is to die {point}, time {times}"
                return lambda: self._say(what, lambda: self.coordinators[place].die_at(point, times))
            case 3:
                return lambda: self._say(f"target {place} dies", lambda: self._kill_target(place, lasting_s))
            case 4:
                return lambda: self._say("the proposer dies", lambda: self._kill_proposer(lasting_s))
            case 5:
                return lambda: self._say("the store goes away", lambda: self._stop_store(lasting_s))
            case 6:
                other = rng.choice(["store", "target-1", "target-2"])
                return lambda: self._say(
                    f"coordinator {place} is cut off from {other}", lambda: self._cut(place, other, lasting_s)
                )
            case _:
                client = rng.choice(clients)
                return lambda: self._say("a client turns to another coordinator", client.leave_for_another)

    def _drain(self, place: int) -> None:
        """Ask a coordinator to end, which may be just starting or dead: then nothing happens."""

        async def end(coordinator: SimCoordinator) -> None:
            if coordinator.process.alive:
                self.met["coordinators asked to end"] += 1
                await coordinator.drain()

        self._say(f"coordinator {place} is asked to end", lambda: self._spawn(end(self.coordinators[place])))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self.starting.add(task)
        task.add_done_callback(self.starting.discard)

    def _say(self, what: str, do: Callable[[], Any]) -> None:
        self.happened.append(f"{asyncio.get_running_loop().time():.4f} {what}")
        do()

    def _heal(self) -> None:
        self.network.heal()
        self.stale = self.link.share = 0.0
        for coordinator in self.coordinators:
            coordinator.link.stale = 0.0

    async def _start_coordinator(self, place: int | None = None) -> None:
        self.num_started += 1
        coordinator = SimCoordinator(
            f"coordinator-{self.num_started}",
            self.parts,
            self.network,
            self.config,
            lambda: self.server,
            self.store,
            lambda: self.groups,
            self.stale,
            self._restart_later,
        )
        await coordinator.driver.start()
        if place is None:
            self.coordinators.append(coordinator)
        else:
            self.coordinators[place] = coordinator

    def _restart_later(self, dead: SimCoordinator) -> None:
        place = self.coordinators.index(dead)
        self._account(dead)

        async def restart() -> None:
            await asyncio.sleep(self.rng.uniform(0.005, 0.2))
            await self._start_coordinator(place)

        self._spawn(restart())

    def _kill_target(self, place: int, lasting_s: float) -> None:
        """All state is gone; a new process of the same name comes later."""
        old = self.groups[place]
        old.process.alive = False
        old.lose()
        new = self.parts.target(old.process.name, self.proposer)
        new.process.alive = False
        self.groups[place] = new
        asyncio.get_running_loop().call_later(lasting_s, lambda: setattr(new.process, "alive", True))

    def _kill_proposer(self, lasting_s: float) -> None:
        self.proposer.process.alive = False
        new = Process("proposer")
        asyncio.get_running_loop().call_later(lasting_s, lambda: setattr(self.proposer, "process", new))

    def _stop_store(self, lasting_s: float) -> None:
        """The process restarts with its log: what it answered is kept, what was on its way to it is not."""
        self.server.alive = False
        new = Process("store")
        asyncio.get_running_loop().call_later(lasting_s, lambda: setattr(self, "server", new))

    def _cut(self, place: int, other: str, lasting_s: float) -> None:
        pair = frozenset((self.coordinators[place].process.name, other))
        self.network.cut.add(pair)
        asyncio.get_running_loop().call_later(lasting_s, lambda: self.network.cut.discard(pair))

    def _account(self, coordinator: SimCoordinator) -> None:
        counters = coordinator.driver.status().counters
        self.met.update({name: int(value) for name, value in counters.items()})
        if coordinator.died_at is not None:
            self.met[f"died {coordinator.died_at}"] += 1

    # ---- what is left ------------------------------------------------------------------------------------------

    def _held(self) -> dict[str, int]:
        held = {f"sequences of {group.process.name}": len(group.held) for group in self.groups}
        for place, coordinator in enumerate(self.coordinators):
            held[f"requests of coordinator {place}"] = len(coordinator.driver.owned())
            held[f"connections of coordinator {place}"] = len(coordinator.connections)
            cohorts_and_link = self.config.cohorts + 1
            held[f"extra tasks of coordinator {place}"] = len(coordinator.driver._background) - cohorts_and_link
        return held


def replay(seed: int) -> tuple[list[str], History]:
    """`simulate` again, with the faults that happened, in order and words."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        world = _World(seed, SOUND)
        return world.happened, runner.run(world.run())
