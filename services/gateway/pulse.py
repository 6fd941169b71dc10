"""Whether a coordinator that callers wait for is at work at all: asked once for all of them, while they wait.

A stream shows signs of life from its first row on (`services/rpc/heartbeat.py`). Before it, and in a call with one
answer, only gRPC's own pings tell a coordinator that is stopped from one that is busy, after two seconds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from seqmtp_serve.tasks import end_tasks
from services.gateway.attempts import Silent
from services.rpc.heartbeat import BEAT_S, SILENCE_S
from services.rpc.wire import coordinator as messages
from services.rpc.wire import coordinator_rpc

T = TypeVar("T")


class Pulses:
    """Of every coordinator that somebody waits for. `channel_to` gives the channel to an address."""

    def __init__(self, channel_to: Callable[[str], grpc.aio.Channel]) -> None:
        self._channel_to = channel_to
        self._waiting: Counter[str] = Counter()  # calls by address
        self._feeling: dict[str, asyncio.Task[None]] = {}  # ends when the coordinator falls silent

    async def unless_silent(self, address: str, call: Awaitable[T]) -> T:
        """What the call gives. Raises Silent, and gives the call up, when its coordinator shows no life meanwhile."""
        answer = asyncio.ensure_future(call)
        if not self._waiting[address] or self._feeling[address].done():
            self._feeling[address] = asyncio.create_task(self._feel(address))
        self._waiting[address] += 1
        try:
            await asyncio.wait({answer, self._feeling[address]}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise Silent(f"the coordinator at {address} is silent")
            return answer.result()
        finally:
            self._waiting[address] -= 1
            if not self._waiting[address]:
                del self._waiting[address]
                await end_tasks(self._feeling.pop(address))
            await end_tasks(answer)

    async def _feel(self, address: str) -> None:
        """Until a question stays unanswered. Any answer is a sign of life; of a lost connection its callers know."""
        stub = coordinator_rpc.CoordinatorStub(self._channel_to(address))
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                await stub.Owns(messages.OwnsRequest(), timeout=SILENCE_S)
            except grpc.aio.AioRpcError as failure:
                if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    return
