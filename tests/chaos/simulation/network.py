"""Messages between simulated processes: late, lost, or after their sender's death, as the seed says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import TypeVar

Answer = TypeVar("Answer")

USUAL_S = 0.001  # mean delay of a message
SLOW_S = (0.02, 0.3)  # of a message that was held up somewhere
NOTICE_S = 0.05  # until a peer that is cut off or gone is noticed


class Process:
    """One incarnation of a process. A restart is another object: messages to the dead never reach the living."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True


class Network:
    """Draws the fate of each message. `loss` and `slow` are probabilities; `cut` pairs do not hear of each other."""

    def __init__(self, rng: Random, *, loss: float, slow: float) -> None:
        self.rng, self.loss, self.slow = rng, loss, slow
        self.cut: set[frozenset[str]] = set()

    def heal(self) -> None:
        """From now on every message arrives, soon."""
        self.loss = self.slow = 0.0
        self.cut.clear()

    def delay_s(self) -> float:
        """How long the next message takes."""
        if self.rng.random() < self.slow:
            return self.rng.uniform(*SLOW_S)
        return self.rng.expovariate(1 / USUAL_S)

    def reaches(self, sender: Process, receiver: Process) -> bool:
        """Whether a message sent now would get there."""
        return receiver.alive and frozenset((sender.name, receiver.name)) not in self.cut

    def send(self, sender: Process, receiver: Process, act: Callable[[], None]) -> None:
        """Do `act` at the receiver after a while, unless the message is lost or the receiver is gone by then."""
        lost = self.rng.random() < self.loss or not self.reaches(sender, receiver)
        if not lost:
            arrive = self.delay_s()
            asyncio.get_running_loop().call_later(arrive, lambda: act() if receiver.alive else None)

    async def call(self, sender: Process, receiver: Process, work: Callable[[], Answer], *, timeout_s: float) -> Answer:
        """Do `work` at the receiver and bring its answer back. TimeoutError: it may have been done, or will be yet."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def take(result: Answer) -> None:
            if not answer.done():
                answer.set_result(result)

        def there() -> None:
            result = work()
            self.send(receiver, sender, lambda: take(result))

        self.send(sender, receiver, there)
        async with asyncio.timeout(timeout_s):
            return await answer


class Pipe:
    """One direction of a connection: messages keep their order; the first that cannot arrive breaks it."""

    def __init__(self, network: Network, sender: Process, receiver: Process, broken: Callable[[], None]) -> None:
        self._network, self._sender, self._receiver, self._broken = network, sender, receiver, broken
        self._last_at = 0.0

    def send(self, act: Callable[[], None], after_s: float = 0.0) -> None:
        """Do `act` at the receiver, after everything sent before; or call `broken` once the loss is noticed."""
        loop = asyncio.get_running_loop()
        self._last_at = max(self._last_at + 1e-6, loop.time() + after_s + self._network.delay_s())

        def arrive() -> None:
            if self._network.reaches(self._sender, self._receiver) and self._sender.alive:
                act()
            else:
                loop.call_later(NOTICE_S, self._broken)

        loop.call_at(self._last_at, arrive)
