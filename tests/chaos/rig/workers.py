"""The whole service as real processes, several of each role, every link between them through a proxy of the rig.

gateway ─▶ coordinator ─▶ target ─▶ proposer        peers are told 127.0.0.2, where a proxy listens for 127.0.0.1
                └─▶ store                           coordinators reach it through one proxy; everybody else directly

Or, `apart`, each worker in a network namespace of its own: then every link is a wire of the kernel's, to be unplugged.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from seqmtp_serve.errors import StoreUnreachable
from services.free_port import free_port
from services.lifeline import die_with_parent
from services.processes import GOODBYE_S
from services.registry import Registry
from services.rpc.build import ROOT
from services.rpc.serving import open_registry
from services.settings import Settings
from services.settings_sources import FAULT_POINTS
from services.store.embedded import EmbeddedValkey
from tests.chaos.rig.links import peers_of
from tests.chaos.rig.namespaces import Wire
from tests.chaos.rig.proxy import Address, Proxy
from tests.chaos.rig.standby import StoreAndReplica
from tests.chaos.rig.store_log import Record

ROLES = ("target", "proposer", "coordinator", "gateway")
OUTSIDE = "127.0.0.2"
READY_S = 90.0


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """One process of a role, at one port for ever; killed ones are started again by `Workers.mend`."""

    role: str
    name: str
    port: int
    file: Path
    log: Path
    process: subprocess.Popen[bytes] | None = None
    proxy: Proxy | None = None
    stopped: bool = False
    host: str = "127.0.0.1"  # where the rig reaches it
    told: str = OUTSIDE  # where its peers are told that it is
    inside: tuple[str, ...] = ()  # what its command line begins with

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Workers:
    """Start, harm and mend them. `copies` of each role; `store` is the embedded server.

    `control` names a negative control: the coordinators are then `broken_coordinator.py`. With a `standby` the store
    has a replica, and every role reaches the store through the proxy, which leads to whichever takes writes. `apart`:
    each worker has a network namespace of its own, and the store is reached over the wire between them.
    """

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        *,
        copies: int,
        points: Path,
        control: str | None = None,
        standby: bool = False,
        apart: bool = False,
    ) -> None:
        self.folder, self.settings, self._points, self._control = folder, settings, points, control
        self._pair = StoreAndReplica(folder, settings.store.durability) if standby else None
        self.store = EmbeddedValkey(folder / "store") if self._pair is None else self._pair.primary
        self.on_fail_over: Callable[[Path, Mapping[str, Record]], None] = lambda *_: None
        self.store_proxy: Proxy | None = None
        self.all = [self._worker(role, number) for role in ROLES for number in range(copies)]
        self._wire = Wire([worker.name for worker in self.all]) if apart else None

    def of(self, role: str) -> list[Worker]:
        """The workers of a role."""
        return [worker for worker in self.all if worker.role == role]

    @property
    def gateways(self) -> list[str]:
        """Base URLs."""
        return [f"http://{worker.address}" for worker in self.of("gateway")]

    async def start(self) -> None:
        """Everything, until every gateway says that it is ready."""
        if self._pair is None:
            self.store.start()
        else:
            await self._pair.start()
        self.settings = self.settings.model_copy(
            update={"store": self.settings.store.model_copy(update={"url": self.store.url})}
        )
        if self._wire is not None:
            self._wire.start()
        through = self._way_to_the_store()
        self.store_proxy = Proxy(through, self.store.socket)
        await self.store_proxy.start()
        proxied_url = f"unix://{through}" if isinstance(through, Path) else f"redis://{through[0]}:{through[1]}"
        for worker in self.all:
            proxied = worker.role == "coordinator" or self._pair is not None or self._wire is not None
            if self._wire is not None:
                worker.host = worker.told = self._wire.address(worker.name)
                worker.inside = tuple(self._wire.inside(worker.name))
                self._wire.lead_in(worker.name, worker.port)
            elif worker.role != "gateway":
                worker.proxy = Proxy((OUTSIDE, worker.port), ("127.0.0.1", worker.port))
                await worker.proxy.start()
            store_url = proxied_url if proxied else self.store.url
            worker.file.write_text(self._settings_of(worker, store_url).to_json())
            self._start(worker)
        await self.ready()

    async def stop(self) -> None:
        """End everything that was started here."""
        for worker in self.all:
            if worker.is_alive:
                os.kill(worker.pid, signal.SIGCONT)
                os.kill(worker.pid, signal.SIGKILL)
                worker.process.wait()
        if self._wire is not None:
            self._wire.stop()
        proxies = [self.store_proxy, *(worker.proxy for worker in self.all)]
        await asyncio.gather(*(proxy.stop() for proxy in proxies if proxy is not None))
        if self._pair is None:
            self.store.stop()
        else:
            await self._pair.stop()

    # ---- harm ------------------------------------------------------------------------------------------------------

    def kill(self, worker: Worker) -> None:
        """SIGKILL, and a new process in its place at once."""
        os.kill(worker.pid, signal.SIGKILL)
        worker.process.wait()
        worker.stopped = False
        self._start(worker)

    def pause(self, worker: Worker) -> None:
        """SIGSTOP."""
        os.kill(worker.pid, signal.SIGSTOP)
        worker.stopped = True

    def go_on(self, worker: Worker) -> None:
        """SIGCONT."""
        os.kill(worker.pid, signal.SIGCONT)
        worker.stopped = False

    def unplug(self, worker: Worker) -> None:
        """Its packets vanish, and those for it. Only `apart`."""
        assert self._wire is not None, "only with namespaces"
        self._wire.unplug(worker.name)

    def plug_in(self, worker: Worker) -> None:
        """It can be reached again."""
        assert self._wire is not None, "only with namespaces"
        self._wire.plug_in(worker.name)

    def ask_to_end(self, worker: Worker) -> None:
        """SIGTERM: it drains."""
        os.kill(worker.pid, signal.SIGTERM)

    async def replace(self, worker: Worker) -> None:
        """Wait for one that was asked to end, and start another in its place. AssertionError: it did not end well."""
        process = worker.process
        assert process is not None
        code = await asyncio.to_thread(process.wait, self.settings.drain_s + GOODBYE_S)
        assert code == 0, f"{worker.name} ended with {code}:\n{worker.log.read_text()[-2000:]}"
        self._start(worker)

    async def kill_store(self, away_s: float) -> None:
        """SIGKILL; the server comes back on its own log after a while."""
        os.kill(self.store.pid, signal.SIGKILL)
        await asyncio.sleep(away_s)
        await asyncio.to_thread(self._restart_store)

    async def fail_over(self, lag_s: float) -> None:
        """The primary is lost while its replica lags; the replica is promoted, and clients follow."""
        assert self._pair is not None, "only with a standby"
        records = await self._pair.promote(lag_s)
        self.store = self._pair.primary
        store = self.settings.store.model_copy(update={"url": self.store.url})
        self.settings = self.settings.model_copy(update={"store": store})
        self.on_fail_over(self.store.directory, records)
        self.store_proxy.lead_to(self.store.socket)
        self.store_proxy.cut()

    async def renew_replica(self) -> None:
        """A new, empty replica for the store that was promoted."""
        assert self._pair is not None, "only with a standby"
        await self._pair.renew_replica()

    def _restart_store(self) -> None:
        self.store.stop()
        self.store.start()

    def with_pid(self, pid: int) -> Worker:
        """The worker that runs as `pid`."""
        return next(worker for worker in self.all if worker.is_alive and worker.pid == pid)

    def peer_of(self, worker: Worker, role: str) -> Worker:
        """The worker of `role` that `worker` is connected to; any, if it is to none."""
        peers = peers_of(worker.pid)
        return next((other for other in self.of(role) if (other.told, other.port) in peers), self.of(role)[0])

    # ---- mending -----------------------------------------------------------------------------------------------------

    async def ready(self, for_role: str | None = None) -> None:
        """Wait until every worker is registered, or those of one role and one of each other; and gateways are ready."""
        wanted = {role: len(self.of(role)) if for_role in (role, None) else 1 for role in ROLES if role != "gateway"}
        async with asyncio.timeout(READY_S), open_registry(self.settings) as registry, httpx.AsyncClient() as http:
            while not (await self._registered(registry, wanted) and await self._gateways_ready(http)):
                for worker in self.all:
                    if not worker.is_alive:
                        raise AssertionError(f"{worker.name} ended:\n{worker.log.read_text()[-2000:]}")
                await asyncio.sleep(0.1)

    async def _registered(self, registry: Registry, wanted: dict[str, int]) -> bool:
        """Whether so many of each role are known; none twice: a killed one's entry must have lapsed."""
        for role, number in wanted.items():
            try:
                peers = await registry.list(role)
            except StoreUnreachable:  # as the services do, ask again
                return False
            if len(peers) < number or len({peer.address for peer in peers}) != len(peers):
                return False
        return True

    async def _gateways_ready(self, http: httpx.AsyncClient) -> bool:
        for url in self.gateways:
            try:
                answer = await http.get(f"{url}/ready", timeout=5.0)
            except httpx.HTTPError:
                return False
            if answer.status_code != 200 or not answer.json()["mtp"]["ready"]:
                return False
        return True

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _way_to_the_store(self) -> Address:
        return self.folder / "store-proxy.sock" if self._wire is None else (self._wire.host, free_port())

    def _worker(self, role: str, number: int) -> Worker:
        name = f"{role}-{number}"
        return Worker(
            role=role,
            name=name,
            port=free_port(),
            file=self.folder / f"{name}.json",
            log=self.folder / f"{name}.log",
        )

    def _settings_of(self, worker: Worker, store_url: str) -> Settings:
        rpc = self.settings.rpc.model_copy(
            update={"advertise_host": worker.told}
            | ({} if worker.role == "gateway" else {f"{worker.role}_port": worker.port})
        )
        return self.settings.model_copy(
            update={
                "rpc": rpc,
                "store": self.settings.store.model_copy(update={"url": store_url}),
                "gateway": self.settings.gateway.model_copy(update={"port": worker.port}),
                "data_dir": self.folder,
            }
        )

    def _start(self, worker: Worker) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", FAULT_POINTS: str(self._points)}
        module = f"services.{worker.role}"
        if self._control is not None and worker.role == "coordinator":
            environment["CHAOS_CONTROL"] = self._control
            module = "tests.chaos.rig.broken_coordinator"
        with worker.log.open("ab") as log:
            log.write(f"--- rig: start at {time.time():.2f}\n".encode())
            worker.process = subprocess.Popen(
                [*worker.inside, sys.executable, "-m", module, "--settings", str(worker.file)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
