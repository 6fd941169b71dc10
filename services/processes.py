"""The whole service as plain child processes: store, target, proposer, coordinator, gateway.

The launcher holds no request state: it starts, watches, restarts and stops. It may be killed at any moment; its
children then end by themselves (`lifeline.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

from seqmtp_serve.errors import NotReady
from seqmtp_serve.tasks import end_tasks
from services import banner
from services.child import Child
from services.interruptible import asking
from services.settings import Settings
from services.store.embedded import EmbeddedValkey

ROLES = ("target", "proposer", "coordinator", "gateway")
GOODBYE_S = 5.0  # past its drain a service gets so long to end
OPTIONAL = frozenset({"proposer"})  # without it the service goes on, at depth 0


async def serve_processes(settings: Settings, package: str = "services") -> int:
    """Serve until SIGINT, SIGTERM or a hang-up; exit code 0. A second signal kills at once.

    Role r is `python -m {package}.r`. Raises NotReady when a service cannot be kept alive, StoreError when the embedded
    store does not start; whatever the reason, on return nothing that was started is left running.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in asking():
        loop.add_signal_handler(number, stop.set)
    settings = with_port(settings)
    with embedded_store(settings) as settings, resolved_file(settings) as file:
        children = [_child(f"{package}.{role}", role, settings, file) for role in ROLES if _wanted(role, settings)]
        try:
            await _run(children, settings, stop)
        finally:
            banner.say("stopping")
            await _stop(children, stop)
    return 0


async def _run(children: list[Child], settings: Settings, stop: asyncio.Event) -> None:
    """Until `stop`. Raises NotReady when a child that is needed stays down."""
    started_at, ready = monotonic(), asyncio.Event()
    logs = children[0].log.parent
    banner.say(f"starting {', '.join(child.name for child in children)}; logs in {logs}")
    stopping = asyncio.create_task(stop.wait())
    keeping = {asyncio.create_task(child.keep_alive(ready)): child for child in children}
    waiting = asyncio.create_task(banner.until_ready(settings))
    pending: set[asyncio.Task[Any]] = {stopping, waiting, *keeping}
    try:
        while not stopping.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if waiting in done:
                ready.set()
                print(banner.text(settings, waiting.result(), monotonic() - started_at), flush=True)
            for kept, child in keeping.items():
                if kept in done:
                    _report(child, kept.result())
    finally:
        await end_tasks(stopping, waiting, *keeping)


def _report(child: Child, code: int) -> None:
    """A child stays down. Raises NotReady unless the service can do without it."""
    if child.name not in OPTIONAL:
        raise NotReady(f"{child.name} does not stay up (exit code {code}); the end of {child.log}:\n{child.tail()}")
    last_line = child.tail().rpartition("\n")[2]
    banner.say(f"{child.name} stays down, every round runs at depth 0: {last_line}")


async def _stop(children: list[Child], again: asyncio.Event) -> None:
    """The gateway first, which lets open streams end; then the others. Another signal meanwhile kills what is left."""

    async def in_order() -> None:
        *others, gateway = children
        await gateway.stop()
        await asyncio.gather(*(child.stop() for child in others))

    again.clear()
    impatient = asyncio.create_task(again.wait())
    stopping = asyncio.create_task(in_order())
    await asyncio.wait([impatient, stopping], return_when=asyncio.FIRST_COMPLETED)
    await end_tasks(impatient, stopping)
    for child in children:
        await child.kill()


def _child(module: str, role: str, settings: Settings, file: Path) -> Child:
    logs = settings.data_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    threads = str(settings.engine.num_threads)
    return Child(
        name=role,
        command=(sys.executable, "-m", module, "--settings", str(file)),
        log=logs / f"{role}.log",
        patience_s=settings.drain_s + GOODBYE_S,
        environment={"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"},
    )


def _wanted(role: str, settings: Settings) -> bool:
    return role != "proposer" or settings.wants_proposer_process


def with_port(settings: Settings) -> Settings:
    """The same settings with a port that is free now. Raises NotReady if the wanted one is taken."""
    gateway = settings.gateway
    family = socket.AF_INET6 if ":" in gateway.host else socket.AF_INET
    try:
        with socket.create_server((gateway.host, gateway.port), family=family) as probe:
            port = int(probe.getsockname()[1])
    except OSError as error:
        raise NotReady(f"cannot listen on {gateway.host}:{gateway.port}: {error.strerror}; choose --port") from error
    return settings.model_copy(update={"gateway": gateway.model_copy(update={"port": port})})


@contextlib.contextmanager
def embedded_store(settings: Settings) -> Iterator[Settings]:
    """Settings that name a store: theirs, or an embedded one that runs as long as the block."""
    if settings.store.url is not None:
        yield settings
        return
    with EmbeddedValkey(settings.data_dir / "valkey", durability=settings.store.durability) as server:
        store = settings.store.model_copy(update={"url": server.url, "password": None, "password_file": None})
        yield settings.model_copy(update={"store": store})


@contextlib.contextmanager
def resolved_file(settings: Settings) -> Iterator[Path]:
    """The whole tree, secrets in clear, in a file that only this user can read and that goes with the block."""
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    file = settings.data_dir.absolute() / f"settings-{os.getpid()}.json"
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(settings.to_json())
    try:
        yield file
    finally:
        file.unlink(missing_ok=True)
