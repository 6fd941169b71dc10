"""One simulated coordinator: the product's round driver on simulated links, which can die at a named point."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from seqmtp_serve.config import SchedulerConfig
from seqmtp_serve.fake import fake_piece
from seqmtp_serve.fault_points import FaultPoint
from tests.chaos.simulation.network import Network, Process
from tests.chaos.simulation.store import LoggedStore, StoreClient
from tests.chaos.simulation.target import SimTarget

if TYPE_CHECKING:
    from tests.chaos.simulation.parts import Parts


class Killed(BaseException):
    """Raised inside the driver at a fault point: the process ends there. No handler of the driver's may stop it."""


class SimCoordinator:
    """`name` is new for each incarnation: it is the owner in claims. `connections` are its clients' open reads."""

    def __init__(
        self,
        name: str,
        parts: Parts,
        network: Network,
        config: SchedulerConfig,
        server: Callable[[], Process],
        store: LoggedStore,
        groups: Callable[[], Sequence[SimTarget]],
        stale: float,
        on_killed: Callable[[SimCoordinator], None],
    ) -> None:
        self.process = Process(name)
        self.connections: list[asyncio.Task[None]] = []
        self._on_killed = on_killed
        self._dies_at: tuple[FaultPoint, int] | None = None
        self.died_at: FaultPoint | None = None
        self.link = parts.link(network, self.process, groups, stale)
        self.driver = parts.driver(
            self.link,
            StoreClient(network, self.process, server, store),
            config,
            lambda _: fake_piece,
            owner=name,
            clock=asyncio.get_running_loop().time,
            draw=network.rng.random,
            reached=self._reached,
        )

    def die_at(self, point: FaultPoint, times: int) -> None:
        """End at the `times`-th time from now that `point` is reached."""
        self._dies_at = (point, times)

    def kill(self) -> None:
        """End now. What it sent is on its way; what it had not sent never leaves; its clients' connections break."""
        if not self.process.alive:
            return
        self.process.alive = False
        current = asyncio.current_task()
        for task in sorted([*self.driver._background, *self.connections], key=lambda task: int(task.get_name()[5:])):
            if task is not current:
                task.cancel()
        self.link.drop()
        self._on_killed(self)

    async def drain(self) -> None:
        """End as one does that is asked to: readers are sent elsewhere, nothing new comes in; then the process goes."""
        await self.driver.close()
        self.kill()

    async def while_alive(self, work: Awaitable[None]) -> None:
        """Run a client's connection as long as the process lives. CancelledError: it died, or the client left."""
        task = asyncio.ensure_future(work)
        if not self.process.alive:
            task.cancel()  # nobody listens there
        self.connections.append(task)
        try:
            await task
        finally:
            self.connections.remove(task)

    def _reached(self, point: FaultPoint) -> None:
        if not self.process.alive:
            raise Killed
        if self._dies_at is not None and self._dies_at[0] is point:
            left = self._dies_at[1] - 1
            self._dies_at = (point, left) if left else None
            if not left:
                self.died_at = point
                self.kill()
                raise Killed
