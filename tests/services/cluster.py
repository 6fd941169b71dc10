"""Real service processes on loopback: started, killed, stopped and continued one by one, by their own handles."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc

from seqmtp_serve.request import CommittedRow, Request
from services.rpc import channel, status
from services.rpc.build import ROOT
from services.rpc.convert import from_wire, to_wire
from services.rpc.serving import open_registry
from services.rpc.wire import coordinator, coordinator_rpc
from services.settings import Settings
from services.store.embedded import EmbeddedValkey

START_TIMEOUT_S = 90.0


class Cluster:
    """One worker a role. Its output goes to `log(role)`. Methods may be used from any event loop."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.settings = settings
        self._folder = folder
        self._file = folder / "settings.json"
        self._file.write_text(settings.to_json())
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *roles: str) -> None:
        """Start a worker of each role."""
        for role in roles:
            with self.log(role).open("ab") as log:
                self._processes[role] = subprocess.Popen(
                    [sys.executable, "-m", f"services.{role}", "--settings", str(self._file)],
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )

    def log(self, role: str) -> Path:
        return self._folder / f"{role}.log"

    def send(self, role: str, number: signal.Signals) -> None:
        """Send a signal to the worker of a role; a killed one is waited for."""
        self._processes[role].send_signal(number)
        if number is signal.SIGKILL:
            self._processes.pop(role).wait()

    async def addresses(self, kind: str) -> list[str]:
        """Of the live workers of a kind."""
        async with open_registry(self.settings) as registry:
            return [peer.address for peer in await registry.list(kind)]

    async def ready(self, *, mtp: bool = True) -> coordinator.StatusReply:
        """Wait until the coordinator says that it can serve, and draft."""
        return await self.until(lambda reply: reply.target_ready and reply.mtp_ready >= mtp)

    async def until(self, holds) -> coordinator.StatusReply:
        """Wait until the coordinator's account of itself satisfies `holds`. Fails if a worker ends meanwhile."""
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                for role, process in self._processes.items():
                    assert process.poll() is None, f"{role} ended:\n{self.log(role).read_text()[-3000:]}"
                if len(await self.addresses("coordinator")) == 1:  # two: one has been killed, its entry has not lapsed
                    with contextlib.suppress(grpc.aio.AioRpcError, ValueError):  # or its entry has lapsed meanwhile
                        async with self.stub() as stub:
                            reply = await stub.Status(coordinator.StatusRequest(), timeout=10)
                        if holds(reply):
                            return reply
                await asyncio.sleep(0.1)

    @asynccontextmanager
    async def stub(self) -> AsyncIterator[coordinator_rpc.CoordinatorStub]:
        """A connection to the coordinator; its end is a client's hang-up."""
        (address,) = await self.addresses("coordinator")
        async with channel.connect(address) as connection:
            yield coordinator_rpc.CoordinatorStub(connection)

    async def generate(self, request: Request) -> AsyncIterator[CommittedRow]:
        """Committed rows as they come; closing it hangs up. Raises the typed error the stream ends with."""
        async with self.stub() as stub:
            async for row in _rows(stub.Generate(coordinator.GenerateRequest(request=to_wire(request)))):
                yield row

    async def attach(self, request_id: str, after_version: int = 0) -> list[CommittedRow]:
        """Rows of a request that somebody started, to its end."""
        async with self.stub() as stub:
            call = stub.Attach(coordinator.AttachRequest(request_id=request_id, after_version=after_version))
            return [row async for row in _rows(call)]

    def stop(self) -> None:
        """Stop every worker; one that does not go in time is killed."""
        for process in self._processes.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()


async def _rows(call: grpc.aio.UnaryStreamCall) -> AsyncIterator[CommittedRow]:
    try:
        async for message in call:
            yield from_wire(CommittedRow, message)
    except grpc.aio.AioRpcError as failure:
        raise status.from_call(failure) from failure


@contextmanager
def cluster(folder: Path, settings: Settings) -> Iterator[Cluster]:
    """A store of its own, and no workers yet. Everything is stopped at the end."""
    with EmbeddedValkey(folder / "store") as valkey:
        store = settings.store.model_copy(update={"url": valkey.url})
        workers = Cluster(folder, settings.model_copy(update={"store": store}))
        try:
            yield workers
        finally:
            workers.stop()
