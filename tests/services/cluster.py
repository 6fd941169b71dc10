"""Real service processes on loopback: started, killed, stopped and continued one by one, by their own handles."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from seqmtp_serve.errors import SeqMTPError
from seqmtp_serve.request import CommittedRow, Request
from services.registry import Registry
from services.rpc import channel, status
from services.rpc.build import ROOT
from services.rpc.convert import from_wire, to_wire
from services.rpc.serving import open_registry
from services.rpc.wire import coordinator, coordinator_rpc
from services.settings import Settings
from services.store.embedded import EmbeddedValkey

START_TIMEOUT_S = 90.0


class Cluster:
    """A store, and workers by role. `log(role)` is where a worker's output goes."""

    def __init__(self, folder: Path, settings: Settings, registry: Registry) -> None:
        self._folder = folder
        self._settings = settings
        self._registry = registry
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: str) -> None:
        """Start one worker of a role."""
        file = self._folder / "settings.json"
        file.write_text(self._settings.to_json())
        with self.log(role).open("ab") as log:
            self._processes[role] = subprocess.Popen(
                [sys.executable, "-m", f"services.{role}", "--settings", str(file)],
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

    async def ready(self, *, mtp: bool = True) -> coordinator.StatusReply:
        """Wait until the coordinator says that it can serve (and draft)."""
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                for role, process in self._processes.items():
                    assert process.poll() is None, f"{role} ended:\n{self.log(role).read_text()[-3000:]}"
                reply = await self.status()
                if reply is not None and reply.target_ready and reply.mtp_ready >= mtp:
                    return reply
                await asyncio.sleep(0.1)

    async def status(self) -> coordinator.StatusReply | None:
        """The coordinator's own account; None while there is no coordinator."""
        peers = await self._registry.list("coordinator")
        if not peers:
            return None
        async with channel.connect(peers[0].address) as connection:
            try:
                stub = coordinator_rpc.CoordinatorStub(connection)
                return await stub.Status(coordinator.StatusRequest(), timeout=5)
            except grpc.aio.AioRpcError:
                return None

    @asynccontextmanager
    async def stub(self) -> AsyncIterator[coordinator_rpc.CoordinatorStub]:
        """A connection to the coordinator; its end is a client's hang-up."""
        (peer,) = await self._registry.list("coordinator")
        async with channel.connect(peer.address) as connection:
            yield coordinator_rpc.CoordinatorStub(connection)

    async def generate(self, request: Request) -> AsyncIterator[CommittedRow]:
        """Committed rows as they come. Raises the typed error the stream ends with."""
        async with self.stub() as stub:
            async for row in rows(stub.Generate(coordinator.GenerateRequest(request=to_wire(request)))):
                yield row

    async def attach(self, request_id: str, after_version: int = 0) -> AsyncIterator[CommittedRow]:
        """Rows of a request that somebody started."""
        async with self.stub() as stub:
            call = stub.Attach(coordinator.AttachRequest(request_id=request_id, after_version=after_version))
            async for row in rows(call):
                yield row

    def stop(self) -> None:
        """Stop every worker; one that does not go within its time is killed."""
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


async def rows(call: grpc.aio.UnaryStreamCall) -> AsyncIterator[CommittedRow]:
    """The values of a stream of rows. Raises the typed error it ends with."""
    try:
        async for message in call:
            yield from_wire(CommittedRow, message)
    except grpc.aio.AioRpcError as failure:
        error: SeqMTPError = status.from_call(failure)
        raise error from failure


@asynccontextmanager
async def cluster(folder: Path, settings: Settings) -> AsyncIterator[Cluster]:
    """A store of its own, and no workers yet. Everything is stopped at the end."""
    with EmbeddedValkey(folder / "store") as valkey:
        settings = settings.model_copy(update={"store": settings.store.model_copy(update={"url": valkey.url})})
        async with open_registry(settings) as registry:
            workers = Cluster(folder, settings, registry)
            try:
                yield workers
            finally:
                workers.stop()
